"""How many minibatches a pipeline needs in flight, and what it reaches with fewer (HetPipe, section 4).

That so many are enough is shown by a cyclic schedule, in which every stage does one forward and one
backward pass in each period, each pass as early as it can. It keeps the paper's conditions 1 and 2:
minibatches pass each stage in order. One enters the pipeline when the one N_m before it has left.
What fewer reach is seen by running them under all three conditions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count, islice

from hetctl.planners.pipeline.memory import minibatches_held

Passes = tuple[tuple[float, float], ...]
"""Seconds of the forward and the backward task of each stage, with what they receive."""

SAME = 1e-9
"""Relative; times that differ by less are the same."""
WAVES = 8
"""Waves of minibatches until a pipeline runs evenly; as many more, twice, are measured."""


def tasks(seconds: Sequence[tuple[float, float, float]]) -> Passes:
    """Return both tasks of each stage from its forward, backward and receive times.

    As much time as a stage needs to receive activations, the one before it needs for the gradients,
    and the first one receives no activations; so one number for both tells them apart.
    """
    found = []
    activations_s = 0.0
    for forward_s, backward_s, receive_s in seconds:
        gradients_s = max(0.0, receive_s - activations_s)
        found.append((activations_s + forward_s, backward_s + gradients_s))
        activations_s = gradients_s
    return tuple(found)


def bottleneck_s(passes: Passes) -> float:
    """Return the least period: the seconds of the slowest stage."""
    return max(forward_s + backward_s for forward_s, backward_s in passes)


def round_trip_s(passes: Passes, period_s: float) -> float:
    """Return how long a minibatch is in the pipeline, if one enters in each period.

    Parameters
    ----------
    period_s : float
        At least the bottleneck. The round trip is then no more than 2 k - 1 periods of k stages.
    """
    starts_s = [0.0]
    for forward_s, _ in passes[:-1]:
        starts_s.append(starts_s[-1] + forward_s)
    now_s = starts_s[-1] + sum(passes[-1])
    for start_s, task in zip(reversed(starts_s[:-1]), reversed(passes[:-1]), strict=True):
        now_s += _wait_s(now_s - start_s, task, period_s) + task[1]
    return now_s


def _wait_s(since_s: float, task: tuple[float, float], period_s: float) -> float:
    """Return how long a backward pass waits for the GPU, between forward passes that recur."""
    forward_s, backward_s = task
    phase_s = since_s % period_s
    slack_s = SAME * period_s
    if phase_s < forward_s - slack_s:
        return forward_s - phase_s
    if phase_s + backward_s > period_s + slack_s:
        return period_s - phase_s + forward_s
    return 0.0


def enough(passes: Passes, period_s: float) -> int:
    """Return the fewest minibatches in flight for such a period."""
    periods = round_trip_s(passes, period_s) / period_s
    return max(1, -int(-(periods - SAME) // 1))


@lru_cache(maxsize=10_000)
def period_s(passes: Passes, in_flight: int) -> float:
    """Return the period that is reached with so many minibatches in flight.

    The bottleneck if they are enough for it; else what first come, first served makes of them.
    """
    least_s = bottleneck_s(passes)
    if enough(passes, least_s) <= in_flight:
        return least_s
    completed_s = list(islice(_completions(passes, in_flight), 3 * WAVES * in_flight))
    first, last = WAVES * in_flight - 1, len(completed_s) - 1
    return max(least_s, (completed_s[last] - completed_s[first]) / (last - first))


def _completions(passes: Passes, in_flight: int) -> Iterator[float]:
    """Yield when minibatches are complete; each is followed by another one at once.

    Of the passes that wait for a GPU the first to come is the first to run (condition 3), unless it is
    a forward pass and memory is full. The last stage does both passes as one.
    """
    last = len(passes) - 1
    queues: list[deque[bool]] = [deque() for _ in passes]
    rooms = [minibatches_held(last - stage, in_flight) for stage in range(len(passes))]
    running = [False] * len(passes)
    ends: list[tuple[float, int, int, bool]] = []
    queues[0].extend([False] * in_flight)
    stage, now_s = 0, 0.0
    for number in count():
        for near in range(max(0, stage - 1), min(last, stage + 1) + 1):
            waiting = [at for at, backward in enumerate(queues[near]) if backward or rooms[near]]
            if waiting and not running[near]:
                backward = queues[near][waiting[0]]
                del queues[near][waiting[0]]
                running[near] = True
                rooms[near] -= not backward
                taken_s = sum(passes[near]) if near == last else passes[near][backward]
                heappush(ends, (now_s + taken_s, 3 * number + near - stage, near, backward))
        now_s, _, stage, backward = heappop(ends)
        running[stage] = False
        rooms[stage] += backward or stage == last
        if stage < last and not backward:
            queues[stage + 1].append(False)
        elif stage > 0:
            queues[stage - 1].append(True)
        else:
            queues[0].append(False)
            yield now_s
