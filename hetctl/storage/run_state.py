"""State of a run derived from its events; each event is read and folded once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby

from hetctl.model.ensemble import Ensemble
from hetctl.model.events import DRIVER, REQUESTS, Event, in_order
from hetctl.model.hops import RunHopPlan, VisitEnd
from hetctl.model.interpreter import frozen_afterwards
from hetctl.model.run import RunSpec
from hetctl.model.searches import PART, SEARCH_ENDED, TRIAL
from hetctl.model.serialization import decode, encode
from hetctl.model.training_progress import EpochResult, Progress, TimedRate
from hetctl.storage.event_log import EventLog
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import OF_DRIVERS, MemberFold, ProgressFold, member_of
from hetctl.storage.snapshot import (
    Row,
    Snapshot,
    StaleSnapshotError,
    key_of,
    read_snapshot,
    row_of,
    write_snapshot,
)
from hetctl.storage.task_fold import TaskFold, TaskKey, TaskRecord, TaskReport, Tasks, UsageFold
from hetctl.storage.visit_fold import TotalsFold, WorkerTotals


def state_in(folder: RunFolder, spec: RunSpec) -> RunState:
    """Read the present state of a run."""
    state = RunState(folder, spec.ensemble, spec.retries)
    state.refresh()
    return state


class RunState:
    """Progress of a run's members, reports of their trainers, and resources used by the run.

    With a valid snapshot only the later events are read; if the snapshot turns out to be invalid, all are.

    Parameters
    ----------
    lazily : bool
        If true, the snapshot's epochs and tasks of a member are read on first use. This raises
        StaleSnapshotError once another snapshot has replaced it, which a new state reads. Such a state writes
        none, and looks for new events where drivers have told of steps.

    Attributes
    ----------
    facts : RunFacts
        Facts about jobs and rounds.
    reports : mapping of (int, str) to TaskReport
        Reports by round and member; tasks that ended before the snapshot have none.
    usage : UsageFold
        Rounds, open tasks, and the resources used.
    hops : TotalsFold
        Totals of the visits of members that hop.
    """

    def __init__(self, folder: RunFolder, ensemble: Ensemble, retries: int, *, lazily: bool = False) -> None:
        self._folder, self._ensemble, self._retries = folder, ensemble, retries
        self._key = self._present_key()
        try:
            self._begin(read_snapshot(folder.state, self._key, lazily=lazily), listed=lazily)
        except (AttributeError, LookupError, TypeError, ValueError):
            self._begin(None)

    def _present_key(self) -> str:
        """Return the key of snapshots that hold for the present members."""
        kept = (
            Event,
            EpochResult,
            TimedRate,
            Progress,
            MemberFold,
            TaskRecord,
            TaskReport,
            VisitEnd,
            RunHopPlan,
            WorkerTotals,
        )
        # Not by run.json: most of its changes matter nothing here, and a changed run may not be stored yet.
        members = self._ensemble.members
        rules = [(m.name, m.batch_size, m.min_batch_size) for m in members]
        # Members beside one another often share a stop rule.
        stops = [(row_of(stop), len(list(alike))) for stop, alike in groupby(m.stop for m in members)]
        return key_of([rules, stops, sorted(self._ensemble.trials), self._retries], *kept)

    def edit(self, ensemble: Ensemble, retries: int) -> None:
        """Go on with edited members, as if all events so far had been read with them.

        Only events about those are read again whose progress may differ: a large run has millions. The next
        update counts these members as changed.

        Raises
        ------
        OSError
            If a file cannot be read; the state is then as before.
        """
        outdated = self._progress.outdated_by(ensemble, retries)
        about: dict[str, list[Event]] = defaultdict(list)
        for source in (DRIVER, REQUESTS) if outdated else ():
            for event in self._log.read_again(source, OF_DRIVERS):
                about[member_of(event)].append(event)
        again = {name: [*about[name], *self._log.read_again(name)] for name in outdated}
        self._ensemble, self._retries = ensemble, retries
        self._key = self._present_key()
        self._progress.edit(ensemble, retries, outdated)
        for events in again.values():
            self._progress.add(events)
        self._unreported |= outdated
        self._is_changed = True

    def _begin(self, snapshot: Snapshot | None, *, listed: bool = False) -> None:
        with frozen_afterwards():
            self._log = EventLog(self._folder)
            known = (snapshot.parts["progress"], snapshot.lines["epochs"]) if snapshot else ()
            self._progress = ProgressFold(self._ensemble, self._retries, *known)
            self._tasks, self.usage, self.facts = TaskFold(), UsageFold(), RunFacts()
            self.reports: dict[TaskKey, TaskReport] = defaultdict(TaskReport)
            self.hops = TotalsFold()
            if snapshot:
                self._log.restore(snapshot.parts["log"], listed=listed)
                self._restore(snapshot)
        self._unreported = set(self._progress.progress)
        self._about: dict[str, list[Event]] = defaultdict(list)
        """Events of drivers and users about members, folded with their own ones in order of time."""
        self._is_changed = self._is_read = False

    def _restore(self, snapshot: Snapshot) -> None:
        """Restore all folds but the members', which are built from their rows."""
        kept = snapshot.parts
        self._tasks.restore(snapshot.lines["tasks"])
        self.usage.restore(kept["usage"])
        self.facts.add(Event(*row) for row in kept["events"])
        self.facts.edits = kept["edits"]
        self.hops.restore(kept["hops"])
        self.reports |= {(index, name): decode(TaskReport, row) for index, name, row in kept["reports"]}

    def keep(self) -> bool:
        """Write a snapshot of the last update, if anything has changed since the last one; return true if so.

        Raises
        ------
        OSError
            If the disk is full or read-only.
        """
        if self._about or not self._is_changed:
            return False
        wanted = {*self.usage.open_tasks, *((index, DRIVER) for index, _ in self.usage.open_tasks)}
        parts = {
            "log": self._log.rows(),
            "progress": self._progress.rows(),
            "usage": self.usage.rows(),
            "events": self.facts.rows(),
            "edits": self.facts.edits,
            "hops": self.hops.rows(),
            "reports": [[*key, encode(self.reports[key])] for key in sorted(wanted & self.reports.keys())],
        }
        lines = {"tasks": self._tasks.lines(), "epochs": self._progress.lines()}
        write_snapshot(self._folder.state, self._key, Snapshot(parts, lines))
        self._is_changed = False
        return True

    @property
    def event_bytes(self) -> int:
        """Same as in `RunSummary`."""
        return self._log.common_bytes

    @property
    def progress(self) -> Mapping[str, Progress]:
        """Progress by member, in the ensemble's order."""
        return self._progress.progress

    @property
    def has_work(self) -> bool:
        """True if a member needs training, or the run's search may ask for more without paused trials."""
        searches = self._ensemble.search is not None and self.facts.search_ended is None
        if any(member.active for member in self.progress.values()):
            return True
        return searches and not any(member.is_paused for member in self.progress.values())

    @property
    def reached_at(self) -> float:
        """Time in seconds since the epoch at which a member last got further than ever before; 0: never."""
        return self._progress.reached_at

    def tasks_of(self, member: str) -> Mapping[int, Tasks]:
        """Return the tasks of a member, by round."""
        return self._tasks.of(member)

    def refresh(self, lengths: Mapping[str, int] | None = None) -> set[str]:
        """Read and fold what was appended to the run's files since the last update.

        Parameters
        ----------
        lengths : mapping of str to int or None
            Same as in `EventLog.read_new_by_file`.

        Returns
        -------
        set of str
            Members whose progress may have changed; all members in the first update.
        """
        try:
            return self._refresh(lengths)
        except StaleSnapshotError:
            self._begin(None)
            return self._refresh(lengths)

    def _refresh(self, lengths: Mapping[str, int] | None) -> set[str]:
        if self._is_read:
            return self._folded(self._log.read_new_by_file(lengths))
        with frozen_afterwards():
            changed = self._folded(self._log.read_new_by_file(lengths))
        self._is_read = True
        return changed

    def _folded(self, files: Iterator[list[Event]]) -> set[str]:
        """Fold the new events of each file; after an error the next call continues."""
        of_drivers_and_users = next(files)
        self._add([event for event in of_drivers_and_users if event.source == DRIVER])
        self.facts.add_requests(event for event in of_drivers_and_users if event.source == REQUESTS)
        for event in of_drivers_and_users:
            self._about[member_of(event)].append(event)
        for events in filter(None, files):
            self._add(events)
            name = events[0].source
            self._unreported |= self._progress.add([*self._about.pop(name, ()), *events])
            if not self._is_read:
                # All events of a large run at once would need much memory.
                self._progress.forget(name)
        self._unreported |= self._progress.add(chain.from_iterable(self._about.values()))
        changed, self._unreported = self._unreported, set()
        self._about.clear()
        return changed

    def _add(self, events: Sequence[Event]) -> None:
        """Fold events into all but the progress of members."""
        for event in events:
            self.reports[event.round, event.source].add(event)
        tasks = self._tasks.add(events)
        self.usage.add(events, tasks)
        self.facts.add(events)
        self.hops.add(events)
        self._is_changed = self._is_changed or bool(events)


OF_JOBS = frozenset({"job_started", "job_ended", "node_failed", "node_joined"})
"""Kinds of event about jobs."""


class RunFacts:
    """Facts of a run, kept up to date with its events."""

    def __init__(self) -> None:
        self.rounds: dict[int, dict[str, Event]] = defaultdict(dict)
        """Events of the start and end of a round, by its index."""
        self.jobs: list[Event] = []
        self.trials: dict[str, Event] = {}
        """Latest requests of the search for each of its trials, by member."""
        self.parts: dict[str, list[Event]] = defaultdict(list)
        """Reports of trials within epochs, by member, in order."""
        self.edits = 0
        """Number of the newest edit of the run that a request tells of."""
        self.first_step: Event | None = None
        self.last: Event | None = None
        self._first: Event | None = None
        self._search_end: Event | None = None

    @property
    def began_at(self) -> float | None:
        """Time of the first event in seconds since the epoch; None before it."""
        return self._first.time if self._first else None

    @property
    def search_ended(self) -> str | None:
        """Reason why the search asks for no more trials; None if it may ask."""
        return self._search_end.record.reason if self._search_end else None

    def add(self, events: Iterable[Event]) -> None:
        """Add events, in whatever order they are read."""
        told = in_order(events)
        if told:
            self._first, self.last = _earlier(self._first, told[0]), _later(self.last, told[-1])
        for event in told:
            if event.kind == "first_step":
                self.first_step = _earlier(self.first_step, event)
            elif event.kind == PART:
                self.parts[event.source].append(event)
            elif event.source == DRIVER and event.kind == TRIAL:
                name = event.record.member
                self.trials[name] = _later(self.trials.get(name), event)
            elif event.source == DRIVER and event.kind == SEARCH_ENDED:
                self._search_end = event
            elif event.source == DRIVER and event.kind in OF_JOBS:
                self.jobs = in_order([*self.jobs, event])
            elif event.source == DRIVER and event.kind in ("round_started", "round_ended"):
                events_of_round = self.rounds[event.round]
                events_of_round[event.kind] = _later(events_of_round.get(event.kind), event)

    def add_requests(self, requests: Iterable[Event]) -> None:
        """Add users' requests, whose times are no times of the run."""
        edits = (event.record.edits for event in requests if event.kind == "request")
        self.edits = max((self.edits, *edits))

    def rows(self) -> list[Row]:
        """Return the events that give the same facts when they are added."""
        of_rounds = (event for events in self.rounds.values() for event in events.values())
        single = filter(None, (self._first, self.first_step, self.last, self._search_end))
        parts = chain.from_iterable(self.parts.values())
        of_search = (*self.trials.values(), *parts)
        kept = {event.order: event for event in (*self.jobs, *of_search, *of_rounds, *single)}
        return [row_of(event) for event in kept.values()]


def _later(one: Event | None, other: Event) -> Event:
    return other if one is None or one.order <= other.order else one


def _earlier(one: Event | None, other: Event) -> Event:
    return other if one is None or other.order < one.order else one
