"""Simulation of the hopper on a virtual clock over one or several epochs; workers may fail and return."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from hetctl.methods.hopper.hop_plans import Rescheduler
from hetctl.methods.hopper.schedule import SearchOptions, UnitTimes
from hetctl.methods.hopper.state_machine import Hopper
from hetctl.model.errors import InfeasibleError
from hetctl.model.hops import Visit
from hetctl.model.values import dataclass

UNIT_ENDS, WORKER_FAILS, WORKER_JOINS = range(3)
"""Kinds of events; at equal times, those with the smaller number are processed first."""


@dataclass(frozen=True)
class Outage:
    """Absence of a worker: one from 0 on is a late start, one without an end is final."""

    worker: str
    start_s: float
    end_s: float = math.inf


@dataclass(frozen=True)
class VisitRecord:
    """A visit with its times.

    Parameters
    ----------
    lost : bool
        True if the worker failed at `end_s`, before the unit was done.
    """

    visit: Visit
    start_s: float
    end_s: float
    lost: bool = False


@dataclass(frozen=True)
class HopTrace:
    """Result of a simulation: all visits in order of their starts, and the log for a replay."""

    records: tuple[VisitRecord, ...]
    log: tuple[Visit, ...]

    @property
    def makespan_s(self) -> float:
        """End of the last completed unit in seconds."""
        return max((record.end_s for record in self.records if not record.lost), default=0.0)


class HopClock:
    """Event loop that reports events to a hopper and starts the visits that it returns.

    Parameters
    ----------
    homes : mapping of str to sequence of str
        Partitions by worker. All workers are present from the beginning, except for their outages.
    seconds : callable
        Time of a visit in seconds.
    epoch_ends : callable
        Called with a configuration and the epoch in which it has visited all partitions. It makes the
        configuration continue or leave, and may let others join.
    outages : iterable of Outage
        Outages of workers in `homes`.
    """

    def __init__(
        self,
        hopper: Hopper,
        homes: Mapping[str, Sequence[str]],
        *,
        seconds: Callable[[Visit], float],
        epoch_ends: Callable[[str, int], None],
        outages: Iterable[Outage] = (),
    ) -> None:
        self._hopper, self._seconds, self._epoch_ends = hopper, seconds, epoch_ends
        self._events: list[tuple[float, int, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._now_s = 0.0
        self._since: dict[str, float] = {}
        self._records: list[VisitRecord] = []
        for worker, partitions in homes.items():
            hopper.worker_joins(worker, partitions)
        for outage in _merged(outages):
            self._expect(outage.start_s, WORKER_FAILS, partial(self._fails, outage.worker))
            if math.isfinite(outage.end_s):
                joins = partial(hopper.worker_joins, outage.worker, homes[outage.worker])
                self._expect(outage.end_s, WORKER_JOINS, joins)

    def run(self) -> HopTrace:
        """Process all events of a time, then start what can start, until all is done.

        Raises
        ------
        InfeasibleError
            If a partition is permanently lost before every configuration has visited it.
        """
        while True:
            while self._events and self._events[0][0] <= self._now_s:
                heapq.heappop(self._events)[-1]()
            for visit in self._hopper.dispatch(self._now_s):
                self._since[visit.worker] = self._now_s
                self._expect(self._now_s + self._seconds(visit), UNIT_ENDS, partial(self._ends, visit))
            if self._hopper.is_over or not self._events:
                break
            self._now_s = self._events[0][0]
        if self._hopper.stranded:
            raise InfeasibleError(
                f"no worker is left with {', '.join(self._hopper.stranded)}, which some configuration has yet"
                " to visit",
                "let a worker return, or put the partition on several",
            )
        return HopTrace(
            tuple(sorted(self._records, key=lambda record: record.visit.number)), tuple(self._hopper.log)
        )

    def _expect(self, at_s: float, kind: int, call: Callable[[], object]) -> None:
        # The counter settles ties, since calls cannot be compared.
        heapq.heappush(self._events, (at_s, kind, next(self._order), call))

    def _ends(self, visit: Visit) -> None:
        # A worker that failed meanwhile has lost this visit: its end in the queue counts no more.
        if not self._hopper.unit_done(visit):
            return
        self._records.append(VisitRecord(visit, self._since[visit.worker], self._now_s))
        if self._hopper.has_finished(visit.config):
            self._epoch_ends(visit.config, visit.epoch)

    def _fails(self, worker: str) -> None:
        lost = self._hopper.worker_fails(worker)
        if lost:
            self._records.append(VisitRecord(lost, self._since[worker], self._now_s, lost=True))


def _merged(outages: Iterable[Outage]) -> list[Outage]:
    """Merge overlapping or adjacent outages of a worker."""
    merged: list[Outage] = []
    for outage in sorted(outages, key=lambda one: (one.worker, one.start_s)):
        last = merged[-1] if merged else None
        if last and last.worker == outage.worker and outage.start_s <= last.end_s:
            merged[-1] = replace(last, end_s=max(last.end_s, outage.end_s))
        else:
            merged.append(outage)
    return merged


def simulate_hops(
    units: UnitTimes,
    *,
    plan: Sequence[Visit] = (),
    seed: int = 0,
    epochs: int | Mapping[str, int] = 1,
    outages: Iterable[Outage] = (),
    reschedule: SearchOptions | None = None,
    evaluate: UnitTimes | None = None,
) -> HopTrace:
    """Run a hopper until every configuration has visited every partition in each of its epochs.

    A configuration begins its next epoch when its previous one has ended, independent of the others
    (CEREBRO, section 2: there is no barrier). It leaves after its last epoch.

    Parameters
    ----------
    plan : sequence of Visit
        Plan for the hopper; empty if it draws units at random.
    epochs : int or mapping of str to int
        Epochs of every configuration, or by configuration; one with 0 or without an entry does not join.
    reschedule : SearchOptions or None
        Options of new plans when workers fail, return or join late; None: the first plan remains in force
        as far as possible. The virtual clock does not advance during rescheduling.
    evaluate : UnitTimes or None
        Times of the visits of every second epoch, in which configurations are evaluated; None: all train.

    Raises
    ------
    InfeasibleError
        If a partition is permanently lost before every configuration has visited it.
    """
    wanted = epochs if isinstance(epochs, Mapping) else dict.fromkeys(units.configs, epochs)
    hopper = Hopper(
        units.partitions,
        seed=seed,
        plan=plan,
        reschedule=Rescheduler(units, wanted, reschedule) if reschedule else None,
    )
    configs, partitions, workers = (
        {name: i for i, name in enumerate(names)}
        for names in (units.configs, units.partitions, units.workers)
    )

    by_kind = (units, evaluate or units)

    def seconds(visit: Visit) -> float:
        place = configs[visit.config], partitions[visit.partition], workers[visit.worker]
        return float(by_kind[visit.epoch % 2].seconds[place])

    def epoch_ends(config: str, epoch: int) -> None:
        if epoch + 1 < wanted[config]:
            hopper.config_joins(config, epoch + 1)
        else:
            hopper.config_stops(config)

    clock = HopClock(hopper, _homes(units), seconds=seconds, epoch_ends=epoch_ends, outages=outages)
    for config in units.configs:
        if wanted.get(config, 0) > 0:
            hopper.config_joins(config)
    return clock.run()


def _homes(units: UnitTimes) -> dict[str, tuple[str, ...]]:
    """Return the availability map: the partitions of each worker, for which it has finite times."""
    has = np.isfinite(units.seconds).any(axis=0)
    return {
        worker: tuple(name for j, name in enumerate(units.partitions) if has[j, k])
        for k, worker in enumerate(units.workers)
    }
