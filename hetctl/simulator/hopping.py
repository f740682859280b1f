"""The hopper under a virtual clock: what its decisions come to, with workers that fail and return."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from hetctl.core.errors import InfeasibleError
from hetctl.planners.hopper.machine import Hopper
from hetctl.planners.hopper.units import UnitTimes
from hetctl.planners.hopper.visits import Visit


class Event(IntEnum):
    """What may happen; of those at the same time the first one here comes first."""

    UNIT_ENDS = 0
    WORKER_FAILS = 1
    WORKER_JOINS = 2


@dataclass(frozen=True)
class Outage:
    """A time without a worker: from 0 on it joins late; without an end it does not return."""

    worker: str
    start_s: float
    end_s: float = math.inf


@dataclass(frozen=True)
class Stay:
    """A visit as it went.

    Parameters
    ----------
    lost : bool
        Whether the worker failed at `end_s`, before the unit was done.
    """

    visit: Visit
    start_s: float
    end_s: float
    lost: bool = False


@dataclass(frozen=True)
class Course:
    """What came of it: every stay in the order of the starts, and the log that a replay needs."""

    stays: tuple[Stay, ...]
    log: tuple[Visit, ...]

    @property
    def makespan_s(self) -> float:
        """When the last unit was done."""
        return max((stay.end_s for stay in self.stays if not stay.lost), default=0.0)


def simulate_hops(
    units: UnitTimes,
    *,
    plan: Sequence[Visit] = (),
    seed: int = 0,
    epochs: int = 1,
    outages: Iterable[Outage] = (),
) -> Course:
    """Run a hopper until every configuration has visited every partition in every epoch.

    An epoch of a configuration begins when its last one has ended, whatever the others do (CEREBRO,
    section 2: there is no barrier).

    Parameters
    ----------
    plan : sequence of Visit
        What the hopper follows; empty: it draws.

    Raises
    ------
    InfeasibleError
        If a partition is lost for good before everybody has visited it.
    """
    hopper = Hopper(units.partitions, seed=seed, plan=plan)
    clock = _Clock(units, hopper, epochs)
    for outage in _merged(outages):
        clock.expect(outage.start_s, Event.WORKER_FAILS, outage.worker)
        if math.isfinite(outage.end_s):
            clock.expect(outage.end_s, Event.WORKER_JOINS, outage.worker)
    clock.run()
    if hopper.stranded:
        raise InfeasibleError(
            f"no worker is left with {', '.join(hopper.stranded)}, which some configuration has yet to visit",
            "let a worker return, or put the partition on several",
        )
    return Course(tuple(clock.stays), hopper.log)


class _Clock:
    def __init__(self, units: UnitTimes, hopper: Hopper, epochs: int) -> None:
        self._units, self._hopper, self._epochs = units, hopper, epochs
        names = (units.configs, units.partitions, units.workers)
        self._numbers = [{name: i for i, name in enumerate(row)} for row in names]
        self._homes = _homes(units)
        self._events: list[tuple[float, Event, int, Any]] = []
        self._order = itertools.count()
        self._now_s = 0.0
        self._since: dict[str, float] = {}
        self.stays: list[Stay] = []
        for worker, partitions in self._homes.items():
            hopper.worker_joins(worker, partitions)
        for config in units.configs:
            hopper.config_joins(config)

    def expect(self, at_s: float, event: Event, what: Any) -> None:
        """Have something happen."""
        heapq.heappush(self._events, (at_s, event, next(self._order), what))

    def run(self) -> None:
        """Let everything happen that happens at a time, then start what can start, until all is done."""
        while True:
            while self._events and self._events[0][0] <= self._now_s:
                _, event, _, what = heapq.heappop(self._events)
                _HAPPENS[event](self, what)
            for visit in self._hopper.dispatch():
                self._since[visit.worker] = self._now_s
                self.expect(self._now_s + self._length_s(visit), Event.UNIT_ENDS, visit)
            if self._hopper.is_over or not self._events:
                break
            self._now_s = self._events[0][0]
        self.stays.sort(key=lambda stay: stay.visit.number)

    def _length_s(self, visit: Visit) -> float:
        configs, partitions, workers = self._numbers
        place = configs[visit.config], partitions[visit.partition], workers[visit.worker]
        return float(self._units.seconds[place])

    def _ends(self, visit: Visit) -> None:
        if not self._hopper.unit_done(visit):
            return
        self.stays.append(Stay(visit, self._since[visit.worker], self._now_s))
        if visit.epoch + 1 < self._epochs and self._hopper.has_finished(visit.config):
            self._hopper.config_joins(visit.config, visit.epoch + 1)

    def _fails(self, worker: str) -> None:
        lost = self._hopper.worker_fails(worker)
        if lost:
            self.stays.append(Stay(lost, self._since[worker], self._now_s, lost=True))

    def _joins(self, worker: str) -> None:
        self._hopper.worker_joins(worker, self._homes[worker])


_HAPPENS: dict[Event, Callable[[_Clock, Any], None]] = {
    Event.UNIT_ENDS: _Clock._ends,
    Event.WORKER_FAILS: _Clock._fails,
    Event.WORKER_JOINS: _Clock._joins,
}


def _homes(units: UnitTimes) -> dict[str, tuple[str, ...]]:
    """Return the availability map: the partitions that each worker has a time for."""
    has = np.isfinite(units.seconds).any(axis=0)
    return {
        worker: tuple(name for j, name in enumerate(units.partitions) if has[j, k])
        for k, worker in enumerate(units.workers)
    }


def _merged(outages: Iterable[Outage]) -> list[Outage]:
    """Join outages of a worker that touch each other."""
    merged: list[Outage] = []
    for outage in sorted(outages, key=lambda one: (one.worker, one.start_s)):
        last = merged[-1] if merged else None
        if last and last.worker == outage.worker and outage.start_s <= last.end_s:
            merged[-1] = replace(last, end_s=max(last.end_s, outage.end_s))
        else:
            merged.append(outage)
    return merged
