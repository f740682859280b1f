"""A pipeline that is run: when its minibatches are complete, first come, first served (HetPipe)."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

from hetctl.planners.pipeline.memory import minibatches_held

Passes = tuple[tuple[float, float], ...]
"""Seconds of the forward and the backward task of each stage, with what they receive."""

ENTRY = -1
"""The place before the first stage, where minibatches wait for weights."""


def wave_ends(
    workers: Sequence[Passes], in_flight: int, sync_s: float = 0.0, distance: int = 0
) -> Iterator[tuple[float, ...]]:
    """Yield for one wave after the other when each virtual worker has completed it.

    A minibatch is followed by another one as soon as that may start. Of the passes that wait for a GPU
    the first to come is the first to run (condition 3), unless it is a forward pass and memory is full.
    The last stage does both passes as one.

    Parameters
    ----------
    workers : sequence of Passes
        Like ones need to be given once only: they run alike.
    sync_s : float
        To send a wave, and to fetch the weights.
    distance : int
        Clock distance D. The last minibatch of a wave starts when the wave D + 1 before it is in the
        weights, of all virtual workers. They are fetched when it would have to wait without, with all
        that has been sent.
    """
    flows = [_Flow(passes, in_flight) for passes in workers]
    sent_s, fetched = [[0.0] * len(flows)], [0] * len(flows)
    there_s = [0.0]
    for waves in count(1):
        ends_s = tuple(flow.next_wave() for flow in flows)
        yield ends_s
        sent_s.append([max(pair) + sync_s for pair in zip(sent_s[-1], ends_s, strict=True)])
        there_s.append(max(sent_s[-1]))
        for number, (flow, end_s) in enumerate(zip(flows, ends_s, strict=True)):
            begin_s = end_s
            if waves - distance > fetched[number]:
                begin_s = max(end_s, there_s[waves - distance])
                fetched[number] = bisect_right(there_s, begin_s) - 1
                begin_s += sync_s
            flow.enter(begin_s)


class _Flow:
    """What waits at each stage, and what runs there."""

    def __init__(self, passes: Passes, in_flight: int) -> None:
        self._passes, self._last, self._wave = passes, len(passes) - 1, in_flight
        self._queues: list[deque[bool]] = [deque() for _ in passes]
        self._rooms = [minibatches_held(self._last - stage, in_flight) for stage in range(len(passes))]
        self._running = [False] * len(passes)
        self._ends: list[tuple[float, int, int, bool]] = []
        self._number = 0
        self._entered_s = 0.0
        for _ in range(in_flight):
            self.enter(0.0)

    def enter(self, at_s: float) -> None:
        """Let a minibatch in, not before those that entered before it."""
        self._entered_s = max(self._entered_s, at_s)
        self._end(self._entered_s, ENTRY, False)

    def next_wave(self) -> float:
        """Run until a wave is complete; all its minibatches but the last one are followed by others."""
        for _ in range(self._wave - 1):
            self.enter(self._next())
        return self._next()

    def _next(self) -> float:
        """Run until a minibatch is complete."""
        while True:
            now_s, _, stage, backward = heappop(self._ends)
            if stage != ENTRY:
                self._running[stage] = False
                self._rooms[stage] += backward or stage == self._last
            if stage < self._last and not backward:
                self._queues[stage + 1].append(False)
            elif stage > 0:
                self._queues[stage - 1].append(True)
            for near in range(max(0, stage - 1), min(self._last, stage + 1) + 1):
                self._start(near, now_s)
            if stage == 0 and (backward or self._last == 0):
                return now_s

    def _start(self, stage: int, now_s: float) -> None:
        queue = self._queues[stage]
        at = next((at for at, backward in enumerate(queue) if backward or self._rooms[stage]), None)
        if at is None or self._running[stage]:
            return
        backward = queue[at]
        del queue[at]
        self._running[stage] = True
        self._rooms[stage] -= not backward
        passes = self._passes[stage]
        taken_s = sum(passes) if stage == self._last else passes[backward]
        self._end(now_s + taken_s, stage, backward)

    def _end(self, at_s: float, stage: int, backward: bool) -> None:
        self._number += 1
        heappush(self._ends, (at_s, self._number, stage, backward))
