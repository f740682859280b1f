"""Resources used by a run so far, derived from its events."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping
from typing import Any

from hetctl.model.events import DRIVER, Event
from hetctl.model.run import Usage
from hetctl.storage.step_fold import StepFold, StepKey, StepRecord, Steps


class UsageFold:
    """Resources used by a run, derived from events in whatever order they are read.

    A step whose end was not reported, because its driver was killed, counts until the last event of its job:
    the newest of the last events of all rounds before the start of the next job.
    """

    def __init__(self) -> None:
        self._rounds = 0
        self.next_round = 0
        self._jobs: list[float] = []
        self._last_of_round: dict[int, float] = {}
        self._ended: dict[StepKey, float] = {}
        self._open: dict[StepKey, StepRecord] = {}

    @property
    def open_steps(self) -> Mapping[StepKey, StepRecord]:
        """Steps whose end was not reported."""
        return self._open

    def rows(self) -> list[Any]:
        """Return the argument of `restore`."""
        return [self._rounds, self.next_round, self._jobs, list(self._last_of_round.items())]

    def restore(self, rows: list[Any], steps: Mapping[StepKey, Steps]) -> None:
        """Continue from an earlier state; to be called before any event is added."""
        self._rounds, self.next_round, self._jobs, last_of_round = rows
        self._last_of_round = dict(last_of_round)
        self.add((), steps)

    @property
    def began_at(self) -> float | None:
        """Start of the first job, in seconds since the epoch; None if none has started."""
        return self._jobs[0] if self._jobs else None

    def add(self, events: Iterable[Event], steps: Mapping[StepKey, Steps]) -> None:
        """Add events, and the steps that have changed with them."""
        for event in events:
            self._count(event)
        for key, states in steps.items():
            self._ended[key] = math.fsum(step.gpu_seconds for step in states)
            self._open.pop(key, None)
            if states and states[-1].ended_at is None:
                self._open[key] = states[-1]

    def used(self, now: float) -> Usage:
        """Return the resources used; `now` is in seconds since the epoch."""
        newest = self._jobs[-1] if self._jobs else -math.inf
        # A new job of the run has started, so the driver of these steps was
        # killed before it could report their end.
        abandoned = [step for step in self._open.values() if step.began_at < newest]
        running = (step for step in self._open.values() if step.began_at >= newest)
        held = [(now - step.began_at) * step.gpus for step in running]
        lost = [(self._lost_at(step.began_at) - step.began_at) * step.gpus for step in abandoned]
        return Usage(self._rounds, math.fsum((*self._ended.values(), *held, *lost)))

    def _lost_at(self, began_at: float) -> float:
        """Return the time at which a step ended with its job."""
        next_job = self._jobs[bisect_right(self._jobs, began_at)]
        return max([began_at, *(last for last in self._last_of_round.values() if last < next_job)])

    def _count(self, event: Event) -> None:
        if event.source == DRIVER and event.kind == "job_started":
            insort(self._jobs, event.time)
            return
        last = self._last_of_round.get(event.round, event.time)
        self._last_of_round[event.round] = max(last, event.time)
        if event.source == DRIVER and event.kind == "round_started":
            self._rounds += 1
            self.next_round = max(self.next_round, event.round + 1)


def usage_of(events: Iterable[Event], now: float) -> Usage:
    """Return the resources used according to a run's events."""
    events, fold = list(events), UsageFold()
    fold.add(events, StepFold().add(events))
    return fold.used(now)
