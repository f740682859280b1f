"""Progress of each member, derived from events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from hetctl.model.ensemble import Ensemble, Member, StopRule
from hetctl.model.events import DRIVER, Event, in_order
from hetctl.model.exit_reason import FREE_NODE_FAILURES, MEMBER_FAULTS, ExitReason
from hetctl.model.searches import REPORT, TRIAL
from hetctl.model.serialization import decode
from hetctl.model.training_progress import EpochResult, Progress
from hetctl.storage.event_log import EventLog
from hetctl.storage.paths import RunFolder
from hetctl.storage.snapshot import OrderedFold, Row, from_row, row_of

RECENT_RESTARTS = 3
"""Number of newest restarts that are kept for a member."""
OF_MEMBERS = frozenset({"started", "first_step", "epoch", "converged", "stopped", "failed"})
"""Kinds of event in a member's file that determine its progress."""
OF_DRIVERS = frozenset({"task_ended", TRIAL, REPORT})
"""Kinds of event in the drivers' file that determine the progress of the member that they name."""


@dataclass(frozen=True)
class _MemberFold:
    """Progress of a member, and what later events are compared with.

    Clocks of nodes differ: only the lines of its file tell whether an epoch was trained before a resumption.

    Parameters
    ----------
    error : str
        Error that its trainer reported when it failed.
    lines : tuple of int
        Line of each finished epoch.
    resumed : tuple of int
        Line of the last resumption, and the epochs in its checkpoint.
    """

    progress: Progress
    error: str = ""
    lines: tuple[int, ...] = ()
    resumed: tuple[int, int] = (-1, 0)


class ProgressFold:
    """Progress of every member, derived from a run's events in whatever order they are read.

    Parameters
    ----------
    rows : mapping of str to Row
        Result of `rows` by member, from which it continues.
    """

    def __init__(
        self, ensemble: Ensemble, retries: int, rows: Mapping[str, Row] = MappingProxyType({})
    ) -> None:
        self._members, self._retries = {member.name: member for member in ensemble.members}, retries
        self._folds = {name: self._restored(name, row) for name, row in rows.items()}
        known = {name: fold.state.progress for name, fold in self._folds.items()}
        self._progress = _before_events(ensemble, known)

    @property
    def progress(self) -> Mapping[str, Progress]:
        """Progress by member, in the ensemble's order."""
        return self._progress

    def rows(self) -> dict[str, Row]:
        """Return what the fold continues from, by member."""
        return {name: _row(fold) for name, fold in self._folds.items()}

    def add(self, events: Iterable[Event]) -> set[str]:
        """Fold more events; return the members that they concern."""
        fresh: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            if (name := _member_of(event)) in self._members:
                fresh[name].append(event)
        for name, new_events in fresh.items():
            if name not in self._folds:
                self._folds[name] = OrderedFold(_MemberFold(self._progress[name]), self._step(name))
            self._folds[name].add(new_events)
            self._progress[name] = self._folds[name].state.progress
        return set(fresh)

    def _restored(self, name: str, row: Row) -> OrderedFold[_MemberFold]:
        until, error, lines, resumed, (member, epochs, *others, restarts_s) = row
        done = tuple([from_row(EpochResult, epoch) for epoch in epochs])
        # JSON has no tuples: with a list, this state would differ from one folded from all events.
        progress = from_row(Progress, (member, done, *others, tuple(restarts_s)))
        state = _MemberFold(progress, error, tuple(lines), tuple(resumed))
        return OrderedFold(state, self._step(name), tuple(until))

    def _step(self, name: str) -> Callable[[_MemberFold, Event], _MemberFold]:
        return partial(_next, self._members[name], self._retries)


def _row(fold: OrderedFold[_MemberFold]) -> Row:
    state = fold.state
    member, epochs, *others = row_of(state.progress)
    progress = [member, [row_of(epoch) for epoch in epochs], *others]
    return [fold.last, state.error, state.lines, state.resumed, progress]


def progress_of(ensemble: Ensemble, events: Iterable[Event], retries: int) -> dict[str, Progress]:
    """Fold a run's events, in order of time, into the progress of every member.

    An epoch counts once, however often it is reported: a trainer that was killed between its checkpoint and
    its event reports the epoch again when it resumes. One that resumes from an earlier checkpoint trains the
    later epochs again: their first reports count no more. A member that converged by a limit of epochs that
    was raised since continues.
    """
    members = {member.name: member for member in ensemble.members}
    states = {name: _MemberFold(progress) for name, progress in _before_events(ensemble, {}).items()}
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


def _before_events(ensemble: Ensemble, known: Mapping[str, Progress]) -> dict[str, Progress]:
    """Return the known progress of members, or that before their first events; no trial is asked for then."""
    trials = ensemble.trials
    return {
        m.name: known.get(m.name) or Progress(m.name, asked=0 if m.name in trials else None)
        for m in ensemble.members
    }


def _member_of(event: Event) -> str:
    """Return the member whose progress an event may change; empty if it changes none."""
    if event.source == DRIVER:
        return str(event.data.get("member")) if event.kind in OF_DRIVERS else ""
    return event.source if event.kind in OF_MEMBERS else ""


def _next(member: Member, retries: int, state: _MemberFold, event: Event) -> _MemberFold:
    progress = state.progress
    if event.kind == "failed":
        return replace(state, error=str(event.data.get("error", "")))
    if event.kind == "task_ended":
        if not progress.active:
            return state
        return replace(state, progress=_after_task(progress, member, event, state.error, retries), error="")
    if event.kind == "started":
        return _resumed(state, event)
    if event.kind == "epoch":
        return _with_epoch(state, event)
    return replace(state, progress=_AFTER.get(event.kind, _after)(progress, member.stop, event))


def _after_request(progress: Progress, _rule: StopRule, event: Event) -> Progress:
    return replace(progress, asked=int(event.data["epochs"]))


def _after_report(progress: Progress, _rule: StopRule, event: Event) -> Progress:
    return replace(progress, reported=int(event.data["epochs"]))


_AFTER = {TRIAL: _after_request, REPORT: _after_report}


def _after(progress: Progress, rule: StopRule, event: Event) -> Progress:
    if event.kind == "first_step":
        return _with_restart(progress, event.data.get("restart_s"))
    if event.kind == "converged":
        history = tuple(done.metrics[rule.metric] for done in progress.epochs if rule.metric in done.metrics)
        return replace(progress, converged=rule.still_converged(str(event.data["reason"]), history))
    return replace(progress, part_samples=int(event.data.get("part_samples", 0)))


def _resumed(state: _MemberFold, event: Event) -> _MemberFold:
    """Return to the checkpoint from which a trainer resumes: later epochs are trained again."""
    last = int(event.data["epochs"])
    kept = [
        (done, line)
        for done, line in zip(state.progress.epochs, state.lines, strict=True)
        if done.epoch <= last or line > event.seq
    ]
    progress = replace(
        state.progress,
        epochs=tuple(done for done, _ in kept),
        part_samples=int(event.data["part_samples"]),
    )
    resumed = max(state.resumed, (event.seq, last))
    return replace(state, progress=progress, lines=tuple(line for _, line in kept), resumed=resumed)


def _with_restart(progress: Progress, seconds: float | None) -> Progress:
    """Record a start on ranks that had trained before."""
    if seconds is None:
        return progress
    return replace(progress, restarts_s=(*progress.restarts_s, float(seconds))[-RECENT_RESTARTS:])


def _after_task(progress: Progress, member: Member, event: Event, error: str, retries: int) -> Progress:
    """Count the end of a task against the member or not; `error` is the report of its trainer."""
    reason, description = ExitReason(event.data["reason"]), str(event.data["description"])
    if reason is ExitReason.OUT_OF_MEMORY:
        smaller = member.smaller_batch(progress.batch_size or member.batch_size)
        return replace(progress, batch_size=smaller) if smaller else replace(progress, failed=description)
    nodes = progress.node_failures + (reason is ExitReason.NODE_FAILURE)
    counts = reason in MEMBER_FAULTS or nodes > max(progress.node_failures, FREE_NODE_FAILURES)
    failures = progress.failures + counts
    failed = (error or description) if failures > retries else None
    return replace(progress, node_failures=nodes, failures=failures, failed=failed)


def _with_epoch(state: _MemberFold, event: Event) -> _MemberFold:
    """Add an epoch, or replace it by what a trainer that has resumed before it made of it."""
    done, (resumed_at, last) = decode(EpochResult, event.data), state.resumed
    known = {old.epoch: (old, line) for old, line in zip(state.progress.epochs, state.lines, strict=True)}
    old, line = known.get(done.epoch, (None, -1))
    is_outdated = event.seq < max(line, resumed_at if done.epoch > last else -1)
    if is_outdated or (old is not None and old.finished_at == done.finished_at):
        return state
    known[done.epoch] = (done, event.seq)
    furthest = max(state.progress.furthest, len(known))
    progress = replace(
        state.progress,
        epochs=tuple(known[number][0] for number in sorted(known)),
        # A member that fails again and again before its next checkpoint gets no further by such epochs.
        failures=0 if furthest > state.progress.furthest else state.progress.failures,
        part_samples=0,
        furthest=furthest,
    )
    return replace(state, progress=progress, lines=tuple(known[number][1] for number in sorted(known)))
