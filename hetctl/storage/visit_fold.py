"""Visits of members that hop, and stages of those that are pipelines, derived from a run's events."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import field, replace
from typing import Any, Generic, TypeVar

from hetctl.model.event_records import Stages, TaskStarted
from hetctl.model.events import DRIVER, Event, Order
from hetctl.model.hops import DONE, LOST, UNDONE, RunHopPlan, VisitEnd
from hetctl.model.values import dataclass
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


STATES = {"visit": DONE, "visit_lost": LOST}
"""Kinds of events about single visits, with the state that each reports."""


def _plan_of(row: Row) -> RunHopPlan:
    plan = RunHopPlan(*row)
    # JSON has no tuples.
    return replace(plan, workers={worker: tuple(partitions) for worker, partitions in plan.workers.items()})


Interval = tuple[float, float]
"""Start and end in seconds since the epoch."""


@dataclass
class WorkerTotals:
    """Visits of a member at one worker.

    Parameters
    ----------
    done, repeated : int
        Visits that were done, and those that were lost or undone.
    worked_s, waited_s : float
        Times of training or evaluation, and of waiting for states, in seconds.
    hops : int
        States that came from another node.
    hops_s : float
        Time of their transfers in seconds.
    """

    done: int = 0
    repeated: int = 0
    worked_s: float = 0.0
    waited_s: float = 0.0
    hops: int = 0
    hops_s: float = 0.0

    def add(self, visit: VisitEnd) -> None:
        """Count a visit."""
        if visit.state != DONE:
            self.repeated += 1
            return
        self.done += 1
        self.worked_s += visit.ended_at - visit.began_at - visit.waited_s
        self.waited_s += visit.waited_s
        self.hops += visit.bytes > 0
        self.hops_s += visit.hop_s if visit.bytes else 0.0


@dataclass
class VisitTotals:
    """Visits of one member.

    Parameters
    ----------
    lost, undone : int
        Visits that do not count, by reason.
    newest_pass : int
        Hopper epoch, as in `VisitEnd.hopper_epoch`, of the newest visit that is done.
    visited : set of int
        Partitions visited in this pass.
    last : tuple of (int, str)
        Number of the newest visit, and its worker.
    workers : dict of str to WorkerTotals
        Its visits by worker.
    rounds : dict of int to Interval
        Start of the first and end of the last visit of each round.
    """

    lost: int = 0
    undone: int = 0
    newest_pass: int = 0
    visited: set[int] = field(default_factory=set)
    last: tuple[int, str] = (-1, "")
    workers: dict[str, WorkerTotals] = field(default_factory=lambda: defaultdict(WorkerTotals))
    rounds: dict[int, Interval] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Number of visits that count."""
        return sum(worker.done for worker in self.workers.values())

    def add(self, visits: Iterable[VisitEnd]) -> None:
        """Count visits, in whatever order."""
        for visit in visits:
            self.workers[visit.worker].add(visit)
            self.last = max(self.last, (visit.number, visit.worker))
            began, ended = self.rounds.get(visit.round, (math.inf, -math.inf))
            self.rounds[visit.round] = min(began, visit.began_at), max(ended, visit.ended_at)
            self.lost += visit.state == LOST
            self.undone += visit.state not in (DONE, LOST)
            if visit.state == DONE and visit.hopper_epoch > self.newest_pass:
                self.newest_pass, self.visited = visit.hopper_epoch, set()
            if visit.state == DONE and visit.hopper_epoch == self.newest_pass:
                self.visited.add(visit.partition)

    def rows(self) -> Row:
        """Return the argument of `from_rows`."""
        workers = [[name, row_of(totals)] for name, totals in self.workers.items()]
        counts = [self.lost, self.undone, self.newest_pass, sorted(self.visited), self.last]
        return [*counts, workers, list(self.rounds.items())]

    @classmethod
    def from_rows(cls, rows: Row) -> VisitTotals:
        """Return the totals with these rows."""
        lost, undone, newest_pass, visited, last, workers, rounds = rows
        found = cls(lost, undone, newest_pass, set(visited), tuple(last))
        found.workers |= {name: WorkerTotals(*row) for name, row in workers}
        found.rounds = {index: (began, ended) for index, (began, ended) in rounds}
        return found


def totals_of(visits: Iterable[VisitEnd]) -> Mapping[str, VisitTotals]:
    """Return the totals of visits, by member."""
    found: defaultdict[str, VisitTotals] = defaultdict(VisitTotals)
    for visit in visits:
        found[visit.member].add([visit])
    return found


class TotalsFold:
    """Totals of the visits of each member, derived from its events in their order, and the plans of the run.

    An epoch is reported once it is in a checkpoint. From then on its visits are only counted.

    Attributes
    ----------
    is_exact : bool
        False if a lost checkpoint undid visits that were only counted: the totals are then wrong.
    """

    def __init__(self) -> None:
        self.is_exact = True
        self._counted: defaultdict[str, VisitTotals] = defaultdict(VisitTotals)
        self._newest: defaultdict[str, VisitFold] = defaultdict(VisitFold)

    def add(self, events: Iterable[Event]) -> None:
        """Fold more events."""
        for event in events:
            if event.kind in STATES or event.kind == "hop_plan":
                self._newest[event.source].add([event])
            elif event.kind == "visits_undone":
                fold = self._newest[event.source]
                self.is_exact = self.is_exact and fold.has(event.record.numbers)
                fold.add([event])
            elif event.kind == "epoch" and event.source in self._newest:
                counted = self._newest[event.source].pop_until(event.record.epoch)
                self._counted[event.source].add(counted)

    @property
    def totals(self) -> Mapping[str, VisitTotals]:
        """Totals of all visits, by member."""
        found = deepcopy(self._counted)
        for member, fold in self._newest.items():
            if member != DRIVER:
                found[member].add(fold.visits)
        return found

    @property
    def plans(self) -> tuple[RunHopPlan, ...]:
        """All plans, in the order of their times."""
        return self._newest[DRIVER].plans

    def rows(self) -> list[Any]:
        """Return the argument of `restore`."""
        counted = {member: totals.rows() for member, totals in self._counted.items()}
        return [self.is_exact, counted, {source: fold.rows() for source, fold in self._newest.items()}]

    def restore(self, rows: list[Any]) -> None:
        """Continue from an earlier state, before events are added."""
        self.is_exact, counted, newest = rows
        self._counted |= {member: VisitTotals.from_rows(own) for member, own in counted.items()}
        for source, own in newest.items():
            self._newest[source].restore(own)


class StageFold:
    """Newest task and newest stages of each member, derived from events in whatever order they are read."""

    def __init__(self) -> None:
        self._tasks: dict[str, Event] = {}
        self._stages: dict[str, Event] = {}

    def add(self, events: Iterable[Event]) -> None:
        """Fold more events; an event that was folded before changes nothing."""
        for event in events:
            if event.kind == "stages":
                _keep_newest(self._stages, event.source, event)
            elif event.source == DRIVER and event.kind == "task_started" and event.record.pipeline:
                _keep_newest(self._tasks, event.record.member, event)

    def task_of(self, member: str) -> TaskStarted | None:
        """Return the newest task of a member as a pipeline; None before the first."""
        event = self._tasks.get(member)
        return event.record if event else None

    def stages_of(self, member: str) -> Stages | None:
        """Return the newest report of a member's stages; None before the first."""
        event = self._stages.get(member)
        return event.record if event else None


def _keep_newest(found: dict[str, Event], member: str, event: Event) -> None:
    if member not in found or found[member].order < event.order:
        found[member] = event


Fold = TypeVar("Fold", VisitFold, StageFold)


class FoldLog(Generic[Fold]):
    """Reader of events into a fold; each call reads only what was appended since the last one.

    Parameters
    ----------
    members : iterable of str
        Members whose events are folded, beside those of drivers.
    """

    def __init__(self, fold: Fold, folder: RunFolder, members: Iterable[str]) -> None:
        self._fold: Fold = fold
        self._files = [EventFile(str(folder.events_of(name)), name) for name in (DRIVER, *members)]

    def refresh(self) -> Fold:
        """Return the fold of all events so far."""
        for file in self._files:
            self._fold.add(file.read_new())
        return self._fold
