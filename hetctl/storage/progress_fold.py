"""Progress of each member, derived from events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from hetctl.model.ensemble import Ensemble, Member, StopRule
from hetctl.model.events import DRIVER, Event, in_order
from hetctl.model.exit_reason import FREE_NODE_FAILURES, MEMBER_FAULTS, ExitReason
from hetctl.model.serialization import decode
from hetctl.model.training_progress import EpochResult, Progress
from hetctl.storage.event_log import EventLog
from hetctl.storage.ordered_fold import OrderedFold
from hetctl.storage.paths import RunFolder
from hetctl.storage.snapshot import Row, row_of

RECENT_RESTARTS = 3
"""Number of newest restarts that are kept for a member."""
OF_MEMBERS = frozenset({"first_step", "epoch", "converged", "stopped", "failed"})
"""Kinds of event in a member's file that determine its progress."""


@dataclass(frozen=True)
class _State:
    """Progress of a member, and the error that its trainer reported when it failed."""

    progress: Progress
    error: str = ""


class ProgressFold:
    """Progress of every member, derived from a run's events in whatever order they are read."""

    def __init__(self, ensemble: Ensemble, retries: int) -> None:
        self._folds = {
            member.name: OrderedFold(_State(Progress(member.name)), partial(_next, member, retries))
            for member in ensemble.members
        }
        self._progress = {name: fold.state.progress for name, fold in self._folds.items()}

    @property
    def progress(self) -> Mapping[str, Progress]:
        """Progress by member, in the ensemble's order."""
        return self._progress

    def rows(self) -> dict[str, Row]:
        """Return the argument of `restore`, by member."""
        return {name: _row(fold) for name, fold in self._folds.items() if fold.last}

    def restore(self, rows: Mapping[str, Row]) -> None:
        """Continue from an earlier state; to be called before any event is added."""
        for name, (until, error, progress) in rows.items():
            member, epochs, *others, restarts_s = progress
            done = tuple([EpochResult(*epoch) for epoch in epochs])
            # JSON has no tuples: with a list, this state would differ from one folded from all events.
            others = (*others, tuple(restarts_s))
            state = _State(Progress(member, done, *others), error)
            self._folds[name] = self._folds[name].onward(state, tuple(until))
            self._progress[name] = state.progress

    def add(self, events: Iterable[Event]) -> set[str]:
        """Fold more events; return the members that they concern."""
        fresh: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            if (name := _member_of(event)) in self._folds:
                fresh[name].append(event)
        for name, new_events in fresh.items():
            self._folds[name].add(new_events)
            self._progress[name] = self._folds[name].state.progress
        return set(fresh)


def _row(fold: OrderedFold[_State]) -> Row:
    member, epochs, *others = row_of(fold.state.progress)
    return [fold.last, fold.state.error, [member, [row_of(epoch) for epoch in epochs], *others]]


def progress_of(ensemble: Ensemble, events: Iterable[Event], retries: int) -> dict[str, Progress]:
    """Fold a run's events, in order of time, into the progress of every member.

    An epoch counts once, however often it is reported: a trainer that was killed between its checkpoint and
    its event reports the epoch again when it resumes. A member that converged by a limit of epochs that was
    raised since continues.
    """
    members = {member.name: member for member in ensemble.members}
    states = {name: _State(Progress(name)) for name in members}
    for event in events:
        if (name := _member_of(event)) in states:
            states[name] = _next(members[name], retries, states[name], event)
    return {name: state.progress for name, state in states.items()}


def events_in(folder: RunFolder) -> list[Event]:
    """Read all event files of a run, sorted by time."""
    return in_order(EventLog(folder).fresh())


def progress_in(folder: RunFolder, ensemble: Ensemble, retries: int) -> dict[str, Progress]:
    """Fold all events of a run."""
    return progress_of(ensemble, events_in(folder), retries)


def _member_of(event: Event) -> str:
    """Return the member whose progress an event may change; empty if it changes none."""
    if event.source == DRIVER:
        return str(event.data.get("member")) if event.kind == "step_ended" else ""
    return event.source if event.kind in OF_MEMBERS else ""


def _next(member: Member, retries: int, state: _State, event: Event) -> _State:
    progress = state.progress
    if event.kind == "failed":
        return _State(progress, str(event.data.get("error", "")))
    if event.kind == "step_ended":
        return (
            _State(_after_step(progress, member, event, state.error, retries)) if progress.active else state
        )
    return replace(state, progress=_after(progress, member.stop, event))


def _after(progress: Progress, rule: StopRule, event: Event) -> Progress:
    if event.kind == "epoch":
        return _with_epoch(progress, event)
    if event.kind == "first_step":
        return _with_restart(progress, event.data.get("restart_s"))
    if event.kind == "converged":
        history = tuple(done.metrics[rule.metric] for done in progress.epochs if rule.metric in done.metrics)
        return replace(progress, converged=rule.still_converged(str(event.data["reason"]), history))
    return replace(progress, part_samples=int(event.data.get("part_samples", 0)))


def _with_restart(progress: Progress, seconds: float | None) -> Progress:
    """Record a start on ranks that had trained before."""
    if seconds is None:
        return progress
    return replace(progress, restarts_s=(*progress.restarts_s, float(seconds))[-RECENT_RESTARTS:])


def _after_step(progress: Progress, member: Member, event: Event, error: str, retries: int) -> Progress:
    """Count the end of a step against the member or not; `error` is the report of its trainer."""
    why, cause = ExitReason(event.data["why"]), str(event.data["cause"])
    if why is ExitReason.OUT_OF_MEMORY:
        smaller = member.smaller_batch(progress.batch_size or member.batch_size)
        return replace(progress, batch_size=smaller) if smaller else replace(progress, failed=cause)
    nodes = progress.node_failures + (why is ExitReason.NODE_FAILURE)
    counts = why in MEMBER_FAULTS or nodes > max(progress.node_failures, FREE_NODE_FAILURES)
    failures = progress.failures + counts
    failed = (error or cause) if failures > retries else None
    return replace(progress, node_failures=nodes, failures=failures, failed=failed)


def _with_epoch(progress: Progress, event: Event) -> Progress:
    known = progress.epochs
    if any(done.epoch == event.data["epoch"] for done in known):
        return progress
    epochs = (*known, decode(EpochResult, event.data))
    if known and known[-1].epoch > epochs[-1].epoch:
        epochs = tuple(sorted(epochs, key=lambda done: done.epoch))
    return replace(progress, epochs=epochs, failures=0, part_samples=0)
