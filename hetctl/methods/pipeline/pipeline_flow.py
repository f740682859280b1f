"""Pipelines that run: when passes start and minibatches are complete, first come, first served (HetPipe).

Each GPU runs one task at a time, under the three conditions of section 4 ("Partition Scheduling"): forward
passes in the order of minibatches, backward passes too, and of both the one that could start first. In the
last stage a minibatch's backward pass follows its forward pass as one task. Between waves virtual workers
keep the clock distance of `hetctl.methods.pipeline.wsp`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from hetctl.methods.pipeline.stage_memory import minibatches_held
from hetctl.methods.pipeline.wsp import Bounds

Passes = tuple[tuple[float, float], ...]
"""Seconds of the forward and the backward task of each stage, with what they receive."""

ENTRY = -1
"""The place before the first stage, where minibatches wait for weights."""


class StageTask(NamedTuple):
    """A task on the GPU of a stage, from start to end; it could have started when it was `ready_s`."""

    stage: int
    minibatch: int
    backward: bool
    ready_s: float
    start_s: float
    end_s: float


def wave_ends(
    workers: Sequence[Passes], in_flight: int, sync_s: float = 0.0, distance: int = 0
) -> Iterator[tuple[float, ...]]:
    """Yield for one wave after the other when each virtual worker has completed it.

    Parameters
    ----------
    workers : sequence of Passes
        Like ones need to be given once only: they run alike.
    sync_s : float
        To send a wave, and to fetch the weights.
    distance : int
        Clock distance D.
    """
    flows = [Flow(passes, held(passes, in_flight), in_flight, sync_s, sync_s) for passes in workers]
    return run_waves(flows, Bounds(in_flight, distance))


def held(passes: Passes, in_flight: int) -> list[int]:
    """Return how many minibatches each stage holds between their passes."""
    last = len(passes) - 1
    return [minibatches_held(last - stage, in_flight) for stage in range(len(passes))]


def run_waves(flows: Sequence[Flow], bounds: Bounds) -> Iterator[tuple[float, ...]]:
    """Run one wave after the other on each virtual worker; yield when each has completed it.

    A minibatch is followed by another one as soon as that may start. The last minibatch of a wave starts
    when the wave D + 1 before it is in the weights, of all virtual workers. They are fetched when it would
    have to wait without, with all that has been sent.
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
    """A virtual worker: what waits at each stage, and what runs there.

    Parameters
    ----------
    rooms : sequence of int
        Minibatches that each stage may hold from their forward to their backward pass.
    push_s, pull_s : float
        To send a wave, and to fetch the weights; both go on beside the passes.

    Attributes
    ----------
    tasks : list of StageTask
        In the order of their starts; the last ones may not have ended.
    completed_s : list of float
        When each minibatch was complete.
    """

    def __init__(
        self, passes: Passes, rooms: Sequence[int], in_flight: int, push_s: float, pull_s: float
    ) -> None:
        self.tasks: list[StageTask] = []
        self.completed_s: list[float] = []
        self.push_s, self.pull_s = push_s, pull_s
        self._passes, self._last, self._wave = passes, len(passes) - 1, in_flight
        self._queues: list[deque[tuple[bool, int, float]]] = [deque() for _ in passes]
        self._rooms = list(rooms)
        self._running = [False] * len(passes)
        self._ends: list[tuple[float, int, int, bool, int]] = []
        self._number = self._entered = 0
        self._entered_s = 0.0
        for _ in range(in_flight):
            self.enter(0.0)

    def enter(self, at_s: float) -> None:
        """Let a minibatch in, not before those that entered before it."""
        self._entered += 1
        self._entered_s = max(self._entered_s, at_s)
        self._end(self._entered_s, ENTRY, False, self._entered)

    def next_wave(self) -> float:
        """Run until a wave is complete; all its minibatches but the last one are followed by others."""
        for _ in range(self._wave - 1):
            self.enter(self._next())
        return self._next()

    def _next(self) -> float:
        """Run until a minibatch is complete."""
        while True:
            now_s, _, stage, backward, minibatch = heappop(self._ends)
            if stage != ENTRY:
                self._running[stage] = False
                self._rooms[stage] += backward or stage == self._last
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
        """Start what came first, unless it is a forward pass and memory is full."""
        queue = self._queues[stage]
        at = next((at for at, waiting in enumerate(queue) if waiting[0] or self._rooms[stage]), None)
        if at is None or self._running[stage]:
            return
        backward, minibatch, ready_s = queue[at]
        del queue[at]
        self._running[stage] = True
        self._rooms[stage] -= not backward
        passes = self._passes[stage]
        end_s = now_s + (sum(passes) if stage == self._last else passes[backward])
        self.tasks.append(StageTask(stage, minibatch, backward, ready_s, now_s, end_s))
        self._end(end_s, stage, backward, minibatch)

    def _end(self, at_s: float, stage: int, backward: bool, minibatch: int) -> None:
        self._number += 1
        heappush(self._ends, (at_s, self._number, stage, backward, minibatch))
