"""Visits of a run whose members hop, derived from its events, and the rules that they must obey."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

from hetctl.model.events import DRIVER, Event, Order
from hetctl.model.run_visit import DONE, LOST, UNDONE, RunHopPlan, RunVisit
from hetctl.storage.event_log import EventFile
from hetctl.storage.paths import RunFolder

VisitKey = tuple[str, int]
"""Member, and number of the visit."""


class VisitFold:
    """Visits and plans of a run, derived from its events in whatever order they are read."""

    def __init__(self) -> None:
        self._visits: dict[VisitKey, tuple[Order, RunVisit]] = {}
        self._undone: set[VisitKey] = set()
        self._plans: dict[Order, RunHopPlan] = {}

    def add(self, events: Iterable[Event]) -> None:
        """Fold more events; an event that was folded before changes nothing."""
        for event in events:
            if event.source == DRIVER:
                if event.kind == "hop_plan":
                    self._plans[event.order] = _plan(event)
            elif event.kind in STATES:
                self._put(event)
            elif event.kind == "visits_undone":
                self._undone.update((event.source, int(number)) for number in event.data["numbers"])

    def _put(self, event: Event) -> None:
        visit = _visit(event)
        key = visit.member, visit.number
        # Of two events of one visit the later one counts.
        if key not in self._visits or self._visits[key][0] < event.order:
            self._visits[key] = event.order, visit

    @property
    def visits(self) -> tuple[RunVisit, ...]:
        """All visits, in the order of their starts, which their numbers give for all nodes alike."""
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

    def look(self) -> VisitFold:
        """Return the fold of all events so far."""
        for file in self._files:
            self.fold.add(file.fresh())
        return self.fold


STATES = {"visit": DONE, "visit_lost": LOST}
"""Kinds of events about single visits, with the state that each reports."""
FIELDS = ("number", "epoch", "evaluates", "partition", "worker", "began_at", "ended_at")
OPTIONAL = ("waited_s", "hop_s", "bytes", "samples", "loss", "reason")


def _visit(event: Event) -> RunVisit:
    data = event.data
    given: dict[str, Any] = {name: data[name] for name in FIELDS}
    given |= {name: data[name] for name in OPTIONAL if name in data}
    return RunVisit(event.source, **given, state=STATES[event.kind], round=event.round)


def _plan(event: Event) -> RunHopPlan:
    data = event.data
    return RunHopPlan(
        time=event.time,
        round=event.round,
        scheduler=data["scheduler"],
        predicted_s=data["predicted_s"],
        lower_bound_s=data["lower_bound_s"],
        workers={worker: tuple(partitions) for worker, partitions in data["workers"].items()},
        reason=data["reason"],
    )


def violations(
    visits: Sequence[RunVisit], partitions: int, epochs: Mapping[str, int], slack_s: float = 0.0
) -> list[str]:
    """Return messages on the violated invariants of CEREBRO, section 2; empty if there are none.

    Parameters
    ----------
    visits : sequence of RunVisit
        All visits of a run.
    partitions : int
        Number of partitions.
    epochs : mapping of str to int
        Finished epochs by member. A later epoch has each of its visits at most once.
    slack_s : float
        Largest difference of the clocks of two nodes, in seconds.
    """
    done = [visit for visit in visits if visit.state == DONE]
    return [
        *_incomplete(done, partitions, epochs),
        *_in_wrong_order(done, slack_s),
        *_overlaps("isolation", visits, "member", slack_s),
        *_overlaps("exclusive access", visits, "worker", slack_s),
        *_preempted(done),
    ]


def _incomplete(done: Sequence[RunVisit], partitions: int, epochs: Mapping[str, int]) -> list[str]:
    """Return violations of the rule that a member visits each partition once in each pass."""
    times = Counter((visit.member, visit.hopper_epoch, visit.partition) for visit in done)
    wanted = {
        (member, epoch, partition): 1
        for member, count in epochs.items()
        for epoch in range(2 * count)
        for partition in range(partitions)
    }
    return [
        f"completeness: {member} visits partition {partition} {times[member, epoch, partition]} times in"
        f" {'evaluation' if epoch % 2 else 'training'} of epoch {epoch // 2 + 1}"
        for member, epoch, partition in sorted(wanted.keys() | times.keys())
        if times[member, epoch, partition] > 1 or (member, epoch, partition) in wanted.keys() - times.keys()
    ]


def _in_wrong_order(done: Sequence[RunVisit], slack_s: float) -> list[str]:
    """Return violations of the rule that a member ends each pass before the next one begins."""
    return [
        f"completeness: visit {later.number} of {member} belongs to an earlier pass than visit {visit.number}"
        for member, own in _by(done, "member").items()
        for visit, later in pairwise(sorted(own, key=attrgetter("began_at")))
        if later.hopper_epoch < visit.hopper_epoch and later.began_at >= visit.began_at + slack_s
    ]


def _overlaps(rule: str, visits: Sequence[RunVisit], of: str, slack_s: float) -> list[str]:
    """Return violations of the rule that a member or a worker has one visit at a time."""
    return [
        f"{rule}: visit {later.number} of {name} begins before visit {visit.number} has ended"
        for name, own in _by(visits, of).items()
        for visit, later in pairwise(sorted(own, key=lambda one: (one.began_at, one.ended_at)))
        if later.began_at < visit.ended_at - slack_s
    ]


def _preempted(done: Sequence[RunVisit]) -> list[str]:
    """Return violations of the rule that a visit is one interval at one worker."""
    numbers = Counter(visit.number for visit in done)
    twice = [f"no preemption: visit {number} is {n} intervals" for number, n in numbers.items() if n > 1]
    # Written with `not`, so that a NaN time counts as a violation.
    wrong = [v for v in done if not v.ended_at >= v.began_at]
    return [*twice, *(f"no preemption: visit {visit.number} ends before it begins" for visit in wrong)]


def _by(visits: Iterable[RunVisit], name: str) -> Mapping[str, list[RunVisit]]:
    found: defaultdict[str, list[RunVisit]] = defaultdict(list)
    for visit in visits:
        found[getattr(visit, name)].append(visit)
    return found
