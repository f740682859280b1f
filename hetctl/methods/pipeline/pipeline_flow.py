"""Simulated pipelines: start of passes and completion of minibatches, first come, first served (HetPipe).

Each GPU runs one task at a time, under the three conditions of section 4 ("Partition Scheduling"): forward
passes in the order of minibatches, likewise backward passes, and of both the one that was ready first. In
the last stage a minibatch's forward and backward pass are one task. Between waves virtual workers keep the
clock distance of `hetctl.methods.pipeline.wsp`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from hetctl.methods.pipeline.stage_costs import minibatches_held
from hetctl.methods.pipeline.wsp import Bounds

Passes = tuple[tuple[float, float], ...]
"""Seconds of the forward and the backward task of each stage, including the transfer of their inputs."""

ENTRY = -1
"""Number of the place before the first stage, where minibatches wait for weights."""


class StageTask(NamedTuple):
    """A task on the GPU of a stage; it was ready at `ready_s`."""

    stage: int
    minibatch: int
    backward: bool
    ready_s: float
    start_s: float
    end_s: float


def wave_ends(
    workers: Sequence[Passes], in_flight: int, sync_s: float = 0.0, distance: int = 0
) -> Iterator[tuple[float, ...]]:
    """Yield for each wave the time in seconds at which each virtual worker has completed it.

    Parameters
    ----------
    workers : sequence of Passes
        Passes of the virtual workers; equal ones need to be given only once, as they run alike.
    sync_s : float
        Time to send a wave, and time to fetch the weights, in seconds.
    distance : int
        Clock distance D.
    """
    flows = [Flow(passes, held(passes, in_flight), in_flight, sync_s, sync_s) for passes in workers]
    return run_waves(flows, Bounds(in_flight, distance))


def held(passes: Passes, in_flight: int) -> list[int]:
    """Return the minibatches that each stage holds between their forward and backward passes."""
    last = len(passes) - 1
    return [minibatches_held(last - stage, in_flight) for stage in range(len(passes))]


def run_waves(flows: Sequence[Flow], bounds: Bounds) -> Iterator[tuple[float, ...]]:
    """Run the virtual workers wave by wave; yield the times at which each has completed the wave.

    When a minibatch is complete, the next one enters as soon as it may start. The last minibatch of a wave
    starts when the wave D + 1 before it, of all virtual workers, is in the weights. The weights are fetched
    only when it would otherwise have to wait, with all waves sent by then.
    """
    sent_s, fetched = [0.0] * len(flows), [0] * len(flows)
    there_s = [0.0]
    for waves in count(1):
        ends_s = tuple(flow.next_wave() for flow in flows)
        yield ends_s
        sent_s = [
            max(before_s, end_s) + flow.push_s
            for before_s, end_s, flow in zip(sent_s, ends_s, flows, strict=True)
        ]
        there_s.append(max(sent_s))
        for number, (flow, end_s) in enumerate(zip(flows, ends_s, strict=True)):
            begin_s = end_s
            if waves - bounds.distance > fetched[number]:
                begin_s = max(end_s, there_s[waves - bounds.distance])
                fetched[number] = bisect_right(there_s, begin_s) - 1
                begin_s += flow.pull_s
            flow.enter(begin_s)


class Flow:
    """A virtual worker: waiting and running tasks of each stage.

    Parameters
    ----------
    capacities : sequence of int
        Minibatches that each stage can hold between their forward and backward passes.
    push_s, pull_s : float
        Time to send a wave, and to fetch the weights; both overlap with the passes.

    Attributes
    ----------
    tasks : list of StageTask
        Tasks in order of their starts; the last ones may not have ended.
    completed_s : list of float
        Completion time of each minibatch.
    """

    def __init__(
        self, passes: Passes, capacities: Sequence[int], in_flight: int, push_s: float, pull_s: float
    ) -> None:
        self.tasks: list[StageTask] = []
        self.completed_s: list[float] = []
        self.push_s, self.pull_s = push_s, pull_s
        self._passes, self._last, self._wave = passes, len(passes) - 1, in_flight
        self._queues: list[deque[tuple[bool, int, float]]] = [deque() for _ in passes]
        self._capacities = list(capacities)
        self._running = [False] * len(passes)
        self._ends: list[tuple[float, int, int, bool, int]] = []
        self._number = self._entered = 0
        self._entered_s = 0.0
        for _ in range(in_flight):
            self.enter(0.0)

    def enter(self, at_s: float) -> None:
        """Add a minibatch, at the earliest when those before it have entered."""
        self._entered += 1
        self._entered_s = max(self._entered_s, at_s)
        self._end(self._entered_s, ENTRY, False, self._entered)

    def next_wave(self) -> float:
        """Run until a wave is complete; each of its minibatches but the last is followed by another one."""
        for _ in range(self._wave - 1):
            self.enter(self._next())
        return self._next()

    def _next(self) -> float:
        """Run until a minibatch is complete, and return the time."""
        while True:
            now_s, _, stage, backward, minibatch = heappop(self._ends)
            if stage != ENTRY:
                self._running[stage] = False
                self._capacities[stage] += backward or stage == self._last
            if stage < self._last and not backward:
                self._queues[stage + 1].append((False, minibatch, now_s))
            elif stage > 0:
                self._queues[stage - 1].append((True, minibatch, now_s))
            for near in range(max(0, stage - 1), min(self._last, stage + 1) + 1):
                self._start(near, now_s)
            if stage == 0 and (backward or self._last == 0):
                self.completed_s.append(now_s)
                return now_s

    def _start(self, stage: int, now_s: float) -> None:
        """Start the first waiting task; forward passes are skipped while memory is full."""
        queue = self._queues[stage]
        # A backward pass frees memory, so it may overtake forward passes that wait for some.
        at = next((at for at, waiting in enumerate(queue) if waiting[0] or self._capacities[stage]), None)
        if at is None or self._running[stage]:
            return
        backward, minibatch, ready_s = queue[at]
        del queue[at]
        self._running[stage] = True
        self._capacities[stage] -= not backward
        passes = self._passes[stage]
        end_s = now_s + (sum(passes) if stage == self._last else passes[backward])
        self.tasks.append(StageTask(stage, minibatch, backward, ready_s, now_s, end_s))
        self._end(end_s, stage, backward, minibatch)

    def _end(self, at_s: float, stage: int, backward: bool, minibatch: int) -> None:
        self._number += 1
        # The number settles ties by the order of starts: first come, first served.
        heappush(self._ends, (at_s, self._number, stage, backward, minibatch))
