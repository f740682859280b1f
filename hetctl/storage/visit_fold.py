"""Visits of a run whose members hop, derived from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hetctl.model.events import DRIVER, Event, Order
from hetctl.model.hops import DONE, LOST, UNDONE, RunHopPlan, VisitEnd
from hetctl.storage.event_log import EventFile
from hetctl.storage.paths import RunFolder
from hetctl.storage.snapshot import Row, row_of

VisitKey = tuple[str, int]
"""Member, and number of the visit."""


class VisitFold:
    """Visits and plans of a run, derived from its events in whatever order they are read."""

    def __init__(self) -> None:
        self._visits: dict[VisitKey, tuple[Order, VisitEnd]] = {}
        self._undone: set[VisitKey] = set()
        self._plans: dict[Order, RunHopPlan] = {}

    def add(self, events: Iterable[Event]) -> None:
        """Fold more events; an event that was folded before changes nothing."""
        for event in events:
            if event.source == DRIVER:
                if event.kind == "hop_plan":
                    made = RunHopPlan(**vars(event.record), time=event.time, round=event.round)
                    self._plans[event.order] = made
            elif event.kind in STATES:
                self._put(event)
            elif event.kind == "visits_undone":
                self._undone.update((event.source, number) for number in event.record.numbers)

    def _put(self, event: Event) -> None:
        state = STATES[event.kind]
        visit = replace(event.record, member=event.source, state=state, round=event.round)
        key = visit.member, visit.number
        # Of two events of one visit the later one counts.
        if key not in self._visits or self._visits[key][0] < event.order:
            self._visits[key] = event.order, visit

    def has(self, numbers: Iterable[int]) -> bool:
        """Return true if visits with all these numbers are in the fold of one member's events."""
        return {number for _, number in self._visits}.issuperset(numbers)

    def pop_until(self, epoch: int) -> tuple[VisitEnd, ...]:
        """Remove the visits up to an epoch, and return them."""
        taken = tuple(visit for visit in self.visits if visit.epoch <= epoch)
        for visit in taken:
            del self._visits[visit.member, visit.number]
            self._undone.discard((visit.member, visit.number))
        return taken

    def rows(self) -> list[Any]:
        """Return the argument of `restore`."""
        visits = [[order, row_of(visit)] for order, visit in self._visits.values()]
        plans = [[order, row_of(plan)] for order, plan in self._plans.items()]
        return [visits, list(self._undone), plans]

    def restore(self, rows: list[Any]) -> None:
        """Continue from an earlier state, before events are added."""
        visits, undone, plans = rows
        found = ((tuple(order), VisitEnd(*row)) for order, row in visits)
        self._visits = {(visit.member, visit.number): (order, visit) for order, visit in found}
        self._undone = {(member, number) for member, number in undone}
        self._plans = {tuple(order): _plan_of(row) for order, row in plans}

    @property
    def visits(self) -> tuple[VisitEnd, ...]:
        """All visits by number, which is the order of their starts on all nodes."""
        found = (
            replace(visit, state=UNDONE) if key in self._undone and visit.state == DONE else visit
            for key, (_, visit) in self._visits.items()
        )
        return tuple(sorted(found, key=lambda visit: (visit.number, visit.began_at, visit.member)))

    @property
    def plans(self) -> tuple[RunHopPlan, ...]:
        """All plans, in the order of their times."""
        return tuple(plan for _, plan in sorted(self._plans.items(), key=lambda entry: entry[0]))


class VisitLog:
    """Reader of the visits of a run; each call reads only what was appended since the last one."""

    def __init__(self, folder: RunFolder, members: Iterable[str]) -> None:
        self.fold = VisitFold()
        self._files = [EventFile(str(folder.events_of(name)), name) for name in (DRIVER, *members)]

    def refresh(self) -> VisitFold:
        """Return the fold of all events so far."""
        for file in self._files:
            self.fold.add(file.read_new())
        return self.fold


STATES = {"visit": DONE, "visit_lost": LOST}
"""Kinds of events about single visits, with the state that each reports."""


def _plan_of(row: Row) -> RunHopPlan:
    plan = RunHopPlan(*row)
    # JSON has no tuples.
    return replace(plan, workers={worker: tuple(partitions) for worker, partitions in plan.workers.items()})
