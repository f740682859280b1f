"""Progress of each member, derived from events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.events import (
    DRIVER,
    FREE_DISK_ERRORS,
    FREE_NODE_FAILURES,
    MEMBER_FAULTS,
    REQUESTS,
    Event,
    ExitReason,
    Request,
    in_order,
)
from hetctl.model.searches import REPORT, TRIAL
from hetctl.model.training_progress import (
    CANCELLED,
    DROPPED,
    PAUSED,
    EpochHistory,
    EpochResult,
    Progress,
    with_fused,
)
from hetctl.model.values import dataclass
from hetctl.storage.event_log import EventLog
from hetctl.storage.paths import RunFolder
from hetctl.storage.snapshot import Line, Lines, OrderedFold, Row, from_fields, with_fields

LARGEST = 2**62
"""Numbers of a line above it are corrupt."""
RECENT_RESTARTS = 3
"""Number of newest restarts that are kept for a member."""
REACHED_AT = 4
"""Place of `MemberFold.reached_at` in a row."""
APART = ("member", "epochs")
"""Fields of `Progress` that are no part of a row as they are."""
OF_MEMBERS = frozenset(
    {
        *("started", "first_step", "rate", "fused", "preprocess", "epoch", "checkpoint", "best_checkpoint"),
        *("converged", "stopped", "failed"),
    }
)
"""Kinds of event in a member's file that determine its progress."""
OF_DRIVERS = frozenset({"task_ended", TRIAL, REPORT, "request"})
"""Kinds of drivers' and users' events that determine the progress of the member that they name."""


@dataclass(frozen=True)
class MemberFold:
    """Progress of a member, and the state that later events are compared with.

    Clocks of nodes differ: only the lines of its file tell whether an epoch was trained before a resumption.

    Parameters
    ----------
    progress : Progress
        Its progress; the epochs are a history with their lines.
    error : str
        Error that its trainer reported when it failed.
    resumed : tuple of int
        Line of the last resumption, and the epochs in its checkpoint.
    reached : tuple of int
        Furthest report so far: the finished epochs, and samples of the next one.
    reached_at : float
        Time of this report in seconds since the epoch; 0 before the first.
    """

    progress: Progress
    error: str = ""
    resumed: tuple[int, int] = (-1, 0)
    reached: tuple[int, int] = (0, 0)
    reached_at: float = 0.0

    @property
    def epochs(self) -> EpochHistory:
        """Its finished epochs."""
        return cast(EpochHistory, self.progress.epochs)


class ProgressFold:
    """Progress of every member, derived from a run's events in whatever order they are read.

    Parameters
    ----------
    rows : mapping of str to Row
        Earlier result of `rows`, to continue from.
    lines : mapping of str to Line
        Earlier result of `lines`.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        retries: int,
        rows: Mapping[str, Row] = MappingProxyType({}),
        lines: Lines = MappingProxyType({}),
    ) -> None:
        self._members, self._retries = {member.name: member for member in ensemble.members}, retries
        self._kept = {name: (row, lines[name]) for name, row in rows.items()}
        """Rows and lines of members without events since."""
        self._folds: dict[str, OrderedFold[MemberFold]] = {}
        known = {name: _progress_in(name, *kept) for name, kept in self._kept.items()}
        self._progress = _before_events(ensemble, known)

    @property
    def progress(self) -> Mapping[str, Progress]:
        """Progress by member, in the ensemble's order."""
        return self._progress

    def outdated_by(self, ensemble: Ensemble, retries: int) -> set[str]:
        """Return the members of an edited ensemble whose progress has to be derived anew."""
        before = self._members
        return {
            member.name
            for member in ensemble.members
            if member.name not in before
            or rule_of(member) != rule_of(before[member.name])
            or retries < self._retries
            or (retries > self._retries and self._progress[member.name].failed)
        }

    def edit(self, ensemble: Ensemble, retries: int, outdated: Set[str]) -> None:
        """Go on with edited members, and without any events of those that are outdated."""
        before, self._members = self._members, {member.name: member for member in ensemble.members}
        self._retries = retries
        for name in outdated | (before.keys() - self._members.keys()):
            self._folds.pop(name, None)
            self._kept.pop(name, None)
        known = {name: done for name, done in self._progress.items() if name not in outdated}
        self._progress = _before_events(ensemble, known)

    @property
    def reached_at(self) -> float:
        """Time in seconds since the epoch at which a member last got further than ever before; 0: never."""
        times = (fold.state.reached_at for fold in self._folds.values())
        return max((*times, *(row[REACHED_AT] for row, _ in self._kept.values())), default=0.0)

    def rows(self) -> dict[str, Row]:
        """Return what the fold continues from, by member."""
        kept = {name: row for name, (row, _) in self._kept.items()}
        return kept | {name: _row(fold) for name, fold in self._folds.items()}

    def lines(self) -> Lines:
        """Return the histories of members with events; each is decoded on first use."""
        kept = {name: line for name, (_, line) in self._kept.items()}
        return kept | {name: fold.state.epochs.packed() for name, fold in self._folds.items()}

    def add(self, events: Iterable[Event]) -> set[str]:
        """Fold more events; return the members that they concern."""
        by_member: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            if (name := member_of(event)) in self._members:
                by_member[name].append(event)
        for name, new_events in by_member.items():
            fold = self._fold_of(name)
            fold.add(new_events)
            self._progress[name] = fold.state.progress
        return set(by_member)

    def forget(self, name: str) -> None:
        """Drop the events of a member; older ones are refused from now on."""
        if name in self._folds:
            self._folds[name].forget()

    def _next(self, name: str, state: MemberFold, event: Event) -> MemberFold:
        return _STEPS[event.kind](state, event, self._members[name], self._retries)

    def _fold_of(self, name: str) -> OrderedFold[MemberFold]:
        if name not in self._folds:
            start, until = MemberFold(with_fields(self._progress[name], epochs=EpochHistory())), None
            if name in self._kept:
                (place, error, resumed, reached, reached_at, *_), _ = self._kept.pop(name)
                times = tuple(resumed), tuple(reached), reached_at
                start, until = MemberFold(self._progress[name], error, *times), tuple(place)
            self._folds[name] = OrderedFold(start, partial(self._next, name), until)
        return self._folds[name]


def _progress_in(member: str, row: Row, line: Line) -> Progress:
    *_, history, given = row
    # JSON has no tuples: with a list, this progress would differ from one folded from all events.
    for name in given.keys() & {"unfit", "fused_rates"}:
        given[name] = tuple(map(tuple, given[name]))
    if restarts_s := given.get("restarts_s"):
        given["restarts_s"] = tuple(restarts_s)
    return from_fields(Progress, member=member, epochs=EpochHistory.from_row(history, line), **given)


def _row(fold: OrderedFold[MemberFold]) -> Row:
    """Return a member's row, without the fields of its progress that have their defaults."""
    state = fold.state
    own = vars(state.progress).items()
    given = {name: value for name, value in own if name not in APART and value != getattr(Progress, name)}
    times = [state.error, state.resumed, state.reached, state.reached_at]
    return [fold.last, *times, state.epochs.row(), given]


def rule_of(member: Member) -> tuple[Any, ...]:
    """Return the settings of a member on which its progress depends, beside its events."""
    return member.stop, member.batch_size, member.min_batch_size


def events_in(folder: RunFolder) -> list[Event]:
    """Read all event files of a run, sorted by time."""
    return in_order(EventLog(folder).read_new())


def _before_events(ensemble: Ensemble, known: Mapping[str, Progress]) -> dict[str, Progress]:
    """Return the known or else the initial progress of members; initially no trial is asked for."""
    trials = ensemble.trials
    return {
        m.name: known.get(m.name) or Progress(m.name, asked=0 if m.name in trials else None)
        for m in ensemble.members
    }


def member_of(event: Event) -> str:
    """Return the member whose progress an event may change; empty if it changes none."""
    if event.source in (DRIVER, REQUESTS):
        return str(event.record.member) if event.kind in OF_DRIVERS else ""
    return event.source if event.kind in OF_MEMBERS else ""


def _with(state: MemberFold, **changed: Any) -> MemberFold:
    return with_fields(state, progress=with_fields(state.progress, **changed))


def _with_fused(state: MemberFold, event: Event, *_: object) -> MemberFold:
    gpu_type = event.record.gpu_type or ""
    newer = tuple((gpu_type, int(members), rate) for members, rate in event.record.rates)
    return _with(state, fused_rates=with_fused(state.progress.fused_rates, newer))


def _after_task(state: MemberFold, event: Event, member: Member, retries: int) -> MemberFold:
    if not state.progress.active:
        return state
    return with_fields(_with(state, **_changes_by_task_end(state, event, member, retries)), error="")


def _changes_by_task_end(state: MemberFold, event: Event, member: Member, retries: int) -> dict[str, Any]:
    """Return the changes of progress by the end of a task, which may count against the member."""
    progress = state.progress
    reason, description = event.record.reason, event.record.description
    if (gpus := event.record.unfit_gpus) is not None:
        return {"unfit": tuple(sorted({*progress.unfit, (event.record.gpu_type or "", gpus)}))}
    if reason is ExitReason.OUT_OF_MEMORY:
        smaller = member.smaller_batch(progress.batch_size or member.batch_size)
        return {"batch_size": smaller, "unfit": ()} if smaller else {"failed": description}
    nodes = progress.node_failures + (reason is ExitReason.NODE_FAILURE)
    disk_errors = progress.disk_errors + (reason is ExitReason.DISK_ERROR)
    beyond_free = {
        ExitReason.NODE_FAILURE: nodes > FREE_NODE_FAILURES,
        ExitReason.DISK_ERROR: disk_errors > FREE_DISK_ERRORS,
    }
    counts = reason in MEMBER_FAULTS or beyond_free.get(reason, False)
    failures = progress.failures + counts
    is_final = failures > retries or reason is ExitReason.BAD_INPUT
    failed = (state.error or description) if is_final else None
    return {"node_failures": nodes, "disk_errors": disk_errors, "failures": failures, "failed": failed}


def _converged(state: MemberFold, event: Event, member: Member, _retries: int) -> MemberFold:
    rule = member.stop
    reason = rule.still_converged(event.record.reason, partial(state.epochs.values, rule.metric))
    return _with(state, converged=reason, script_s=state.progress.script_s + event.record.duration_s)


def _stopped(state: MemberFold, event: Event, member: Member, _retries: int) -> MemberFold:
    stopped, script_s = event.record, state.progress.script_s + event.record.duration_s
    # A limit that was lowered since is met without another start: its last state is in a checkpoint.
    reason = member.stop.reason_to_stop(state.epochs.values(member.stop.metric))
    return _with(state, converged=reason, part_samples=stopped.part_samples, script_s=script_s)


def _after_start(state: MemberFold, event: Event, member: Member, _retries: int) -> MemberFold:
    """Record the time of the first start, and those of later ones on ranks that had trained before."""
    first, progress = event.record, state.progress
    startup_s, restarts_s = first.startup_s, progress.restarts_s
    if first.restart_s is not None:
        restarts_s = (*restarts_s, float(first.restart_s))[-RECENT_RESTARTS:]
        # Members that train fused from the start wait together for the start of their process.
        startup_s = startup_s if member.command else first.restart_s
    return _with(
        state,
        restarts_s=restarts_s,
        startup_s=startup_s if progress.startup_s is None else progress.startup_s,
        peak_memory_bytes=max(progress.peak_memory_bytes, first.peak_memory_bytes or 0),
    )


def _resumed(state: MemberFold, event: Event, _member: Member, _retries: int) -> MemberFold:
    """Return to the checkpoint from which a trainer resumes: later epochs are trained again."""
    last = event.record.epochs
    kept = [(done, line) for done, line in state.epochs.after(last) if line > event.seq]
    epochs = _extended(state.epochs.until(last), kept)
    samples = event.record.samples or state.progress.samples_per_epoch
    state = _with(state, epochs=epochs, part_samples=event.record.part_samples, samples_per_epoch=samples)
    return with_fields(state, resumed=max(state.resumed, (event.seq, last)))


def _after_reaching(state: MemberFold, event: Event, reached: tuple[int, int]) -> MemberFold:
    # A resumed member reports epochs again; only getting further than ever before is progress.
    if reached <= state.reached:
        return state
    return with_fields(_with(state, disk_errors=0), reached=reached, reached_at=event.time)


def _saved(state: MemberFold, event: Event, _member: Member, _retries: int) -> MemberFold:
    saved = event.record
    if saved.duration_s is not None:
        state = _with(state, checkpoint_s=saved.duration_s)
    return _after_reaching(state, event, (saved.epoch, saved.part_samples))


def _with_epoch(state: MemberFold, event: Event, _member: Member, _retries: int) -> MemberFold:
    """Add an epoch; if it was trained again after a resumption, it replaces the earlier one."""
    done, (resumed_at, last) = event.record, state.resumed
    state = _after_reaching(state, event, (done.epoch, 0))
    later = state.epochs.after(done.epoch - 1)
    old, line = later[0] if later and later[0][0].epoch == done.epoch else (None, -1)
    is_outdated = event.seq < max(line, resumed_at if done.epoch > last else -1)
    if is_outdated or (old is not None and old.finished_at == done.finished_at):
        return state
    new = [(done, event.seq), *(later if old is None else later[1:])]
    try:
        epochs = _extended(state.epochs.until(done.epoch - 1), new)
    except OverflowError:
        # The line is corrupt: there are no such numbers.
        return state
    furthest = state.progress.furthest
    # A member may fail before each next checkpoint: epochs that it trains again are no progress.
    further = {"failures": 0, "furthest": len(epochs)} if len(epochs) > furthest else {}
    # A command does not say at its start how long its epochs are.
    samples = state.progress.samples_per_epoch or int(_number_of(event, "samples") or 0) or None
    evaluate_s = _number_of(event, "evaluate_s")
    if evaluate_s is None:
        evaluate_s = state.progress.evaluate_s
    known = {"samples_per_epoch": samples, "evaluate_s": evaluate_s}
    return _with(state, epochs=epochs, part_samples=0, **known, **further)


def _number_of(event: Event, key: str) -> float | None:
    number = event.data.get(key)
    return float(number) if isinstance(number, (int, float)) and 0 <= number < LARGEST else None


def _requested(state: MemberFold, event: Event, _member: Member, _retries: int) -> MemberFold:
    return with_fields(_with(state, **_REQUESTED.get(event.record.want, {})), error="")


_REQUESTED: Mapping[Request, Mapping[str, Any]] = {
    Request.PAUSE: {"withheld": PAUSED},
    Request.CANCEL: {"withheld": CANCELLED},
    Request.RESUME: {"withheld": None},
    Request.ADD: {"withheld": None},
    Request.DROP: {"withheld": DROPPED},
    Request.RETRY: {"failed": None, "failures": 0, "node_failures": 0, "disk_errors": 0, "unfit": ()},
}
"""Changes of a member's progress by the user's request."""


def _extended(epochs: EpochHistory, more: list[tuple[EpochResult, int]]) -> EpochHistory:
    return epochs.plus((done for done, _ in more), (line for _, line in more))


Step = Callable[[MemberFold, Event, Member, int], MemberFold]
_STEPS: Mapping[str, Step] = {
    TRIAL: lambda state, event, *_: _with(state, asked=event.record.epochs),
    REPORT: lambda state, event, *_: _with(state, reported=event.record.epochs),
    "task_ended": _after_task,
    "request": _requested,
    "started": _resumed,
    "first_step": _after_start,
    "rate": lambda state, event, *_: _with(state, epochs=state.epochs.with_rate(event.record)),
    "fused": _with_fused,
    "preprocess": lambda state, event, *_: _with(
        state, preparation_rate=event.record.rate / event.record.cores
    ),
    "epoch": _with_epoch,
    "checkpoint": _saved,
    "best_checkpoint": lambda state, event, *_: _with(
        state, best_epoch=event.record.epoch, best_checkpoint=event.record.path
    ),
    "converged": _converged,
    "stopped": _stopped,
    "failed": lambda state, event, *_: with_fields(state, error=event.record.error),
}
