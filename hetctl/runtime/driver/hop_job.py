"""Hops in a job: turns reports of agents and ranks into events, and commands into messages and records."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

from hetctl.methods.hopper.hop_events import (
    Converge,
    FetchState,
    ForgetStates,
    HopProgress,
    OpenHops,
    UndoVisits,
)
from hetctl.methods.hopper.hop_plans import HopPlanner
from hetctl.methods.hopper.hop_scheduler import HopRules, HopScheduler
from hetctl.methods.hopper.schedule import SearchOptions, visits_to_repeat
from hetctl.methods.hopper.worker_groups import modes
from hetctl.model.ensemble import Member
from hetctl.model.events import DRIVER, Event
from hetctl.model.hops import HopPlanMade, StateFetched, StateSaved, Visit, VisitEnd, node_of
from hetctl.model.plan import HOPPER
from hetctl.model.run import RunSpec
from hetctl.model.serialization import encode
from hetctl.model.training_progress import NO_BEST, BestCheckpoint, EpochResult
from hetctl.model.training_settings import FRAMEWORKS
from hetctl.model.values import dataclass
from hetctl.runtime.agent.messages import StoreOrder
from hetctl.runtime.data.sharing.node_folder import run_key
from hetctl.runtime.driver.job_modes import JobMode
from hetctl.runtime.driver.rounds import Rounds
from hetctl.runtime.worker.checkpoint import CheckpointFolder, TrainingState, visit_in
from hetctl.scheduling.job_scheduler import RunningTask
from hetctl.storage.event_files import read_events
from hetctl.storage.patience import PATIENT
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import checkpoint_folder

TRIALS_EVERY_S = 1.0
"""Seconds between two checks for new trials of a search while no visit ends."""


PLACE_FIELDS = ("number", "epoch", "partition", "evaluates", "worker", "began_at", "ended_at")
LOST_FIELDS = (*PLACE_FIELDS, "reason")
TIME_FIELDS = ("meet_s", "waited_s", "restore_s", "train_s", "save_s", "hop_s")
DONE_FIELDS = (*PLACE_FIELDS, *TIME_FIELDS, "bytes", "samples", "loss")
"""Fields of `VisitEnd` in events."""


class HopJob(JobMode):
    """Visits of one job: their records in the event files, and the stores of the job's nodes.

    The driver alone writes these events: a member's ranks are on several nodes, and appends of two nodes may
    damage a file on a shared file system.
    """

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(rounds)
        agents, spec = rounds.rank_pool.agents, rounds.spec
        self.executors = {
            OpenHops: self._open,
            FetchState: lambda command: agents.fetch(command.node, command.state, command.source),
            ForgetStates: lambda command: agents.forget(command.states, command.nodes),
            UndoVisits: self._undo,
            Converge: lambda command: self._write(command.member, "converged", reason=command.reason),
            HopPlanMade: lambda command: self._write(DRIVER, "hop_plan", **encode(command)),
        }
        # Agents that start from now on open stores.
        partitions, control = spec.ensemble.partitions, tuple(spec.site.network.control)
        assert partitions is not None
        self._partitions = partitions.count
        agents.store = StoreOrder(run_key(spec.run, spec.checkpoints), partitions.paths(), control)
        self._round = 0
        self._running: Mapping[str, RunningTask] = {}
        self._results: dict[tuple[str, int], EpochResult] = {}
        self._best: dict[str, BestCheckpoint] = {}
        self._fetched: dict[tuple[str, str], StateFetched] = {}
        self._asked: dict[str, int] = {}
        self._next_trials = 0.0

    def scheduler(self) -> HopScheduler:
        """Begin the hops, from the members' newest checkpoints; return their scheduling."""
        spec, options, members = self.rounds.spec, self.options, self.rounds.members
        left = self.left(time.time() - members.began_at)
        drop_leftovers(spec, left)
        recorded = recorded_visits(events_in(self.rounds.folder))
        states = newest_states(spec, left, recorded)
        self.reconcile(states, members.epochs(left), recorded)
        # Members within a data-parallel epoch go on in the next phase.
        fit = [name for name in left if not states[name].is_within_epoch]
        self._asked = dict(members.asked())
        progress = [
            hop_progress(member, states[member.name], self._partitions)
            for member in members.with_batch_sizes(fit)
        ]
        rules = HopRules(
            partitions=self._partitions,
            seed=options.seed,
            replay=visits_to_repeat(Path(spec.replay).read_text(encoding="utf-8")) if spec.replay else (),
            first_number=next_number(spec, left, recorded),
            least_members=least_to_hop(spec.gpus) if spec.phases[-1] != HOPPER else 0,
        )
        search = SearchOptions(seed=options.seed, seconds=options.solver_time_limit_s)
        packages = FRAMEWORKS[spec.ensemble.framework].packages
        planner = HopPlanner(options.hop_scheduler, search, forms_groups=all(map(find_spec, packages)))
        scheduler = HopScheduler(rules, progress, planner, self)
        self._running = scheduler.running
        return scheduler

    def reconcile(
        self, states: Mapping[str, TrainingState], epochs: Mapping[str, int], recorded: RecordedVisits
    ) -> None:
        """Make the log agree with the checkpoints from which members continue.

        The last driver may have been killed between a checkpoint and its event, or between a visit and its
        checkpoint.

        Parameters
        ----------
        epochs : mapping of str to int
            Finished epochs in the events, by member.
        """
        for name, state in states.items():
            lost = sorted(number for number in recorded.of(name) if number > state.visit)
            if lost:
                self._write(name, "visits_undone", numbers=lost, reason="no checkpoint has them")
            if len(state.epochs) > epochs[name]:
                self._write(name, "epoch", **encode(state.epochs[-1]))

    def reports(self) -> Iterator[Any]:
        """Yield the reports of agents and ranks since the last call; record visits and checkpoints."""
        rank_pool = self.rounds.rank_pool
        reports, rank_pool.reports = rank_pool.reports, []
        for report in reports:
            if isinstance(report, StateFetched):
                self._fetched[report.node, report.state] = report
            elif isinstance(report, StateSaved):
                self._record_checkpoint(report)
            elif isinstance(report, VisitEnd):
                task = self._running[report.member].task if report.member in self._running else None
                # A rank that was given up may report a visit that has started again elsewhere.
                if not (task and task.visit and report.number == task.visit.number):
                    continue
                self._record_visit(report, task.visit)
            yield report
            self._next_trials = 0.0

    def arrivals(self, *, some_ended: bool) -> Iterator[HopProgress]:
        """Yield the trials that a search has asked for."""
        members = self.rounds.members
        if self.rounds.spec.ensemble.search is None or (
            not some_ended and time.monotonic() < self._next_trials
        ):
            return
        self._next_trials = time.monotonic() + TRIALS_EVERY_S
        asked = members.asked()
        new = [name for name, epochs in asked.items() if epochs > self._asked.get(name, 0)]
        for member in members.with_batch_sizes(new):
            yield PATIENT.call(self._progress_of, member)
        self._asked.update(asked)

    def _progress_of(self, member: Member) -> HopProgress:
        """Return the progress of a trial that joins the hops, from its events and its newest checkpoint."""
        recorded = recorded_visits(read_events(self.rounds.folder.events_of(member.name)))
        state = newest_states(self.rounds.spec, [member.name], recorded)[member.name]
        return hop_progress(member, state, self._partitions)

    def on_task_ended(self, running: RunningTask, reason: str) -> None:
        """Record a visit that ended without a new state."""
        if (visit := running.task.visit) and not running.done:
            lost = visit.ended(self.rounds.members.began_at + running.since_s, time.time(), reason=reason)
            self._write(visit.config, "visit_lost", **{name: getattr(lost, name) for name in LOST_FIELDS})

    def _open(self, command: OpenHops) -> None:
        """Begin the round of all visits; the agents of all nodes start now."""
        self._round = command.round
        self.rounds.open(command.round, command.members)
        try:
            PATIENT.call(self.rounds.rank_pool.start_agents)
        except OSError as error:
            self.rounds.on_failure(error)

    def _undo(self, command: UndoVisits) -> None:
        for number in command.numbers:
            self._results.pop((command.member, number), None)
        self._write(command.member, "visits_undone", numbers=list(command.numbers), reason=command.reason)

    def _record_visit(self, end: VisitEnd, visit: Visit) -> None:
        if hop := self._fetched.pop((node_of(visit.worker), visit.state or ""), None):
            end = replace(end, hop_s=hop.duration_s, bytes=hop.bytes)
        self._write(end.member, "visit", **{name: getattr(end, name) for name in DONE_FIELDS})
        if end.result:
            self._results[end.member, end.number] = end.result

    def _record_checkpoint(self, saved: StateSaved) -> None:
        of_event = ("epoch", "part_samples", "path", "bytes", "sha256", "duration_s")
        self._write(saved.member, "checkpoint", **{name: getattr(saved, name) for name in of_event})
        for name in saved.damaged:
            self._write(saved.member, "checkpoint_invalid", name=name)
        if saved.best != self._best.get(saved.member, NO_BEST):
            self._best[saved.member] = saved.best
            self._write(saved.member, "best_checkpoint", **encode(saved.best))
        # An epoch is finished once it is in a checkpoint.
        if result := self._results.pop((saved.member, saved.number), None):
            samples = round(result.rate * result.duration_s) if result.rate else None
            self._write(saved.member, "epoch", **encode(result), evaluate_s=0.0, samples=samples)

    def _write(self, source: str, kind: str, **data: Any) -> None:
        def announce(length: int) -> None:
            if source != DRIVER:
                self.rounds.rank_pool.note_written(source, length)

        self.rounds.queue.writer(source, self._round, announce).write(kind, **data)


def least_to_hop(gpus: int) -> int:
    """Return the least number of members for which hopping is preferable (CEREBRO, appendix 12)."""
    return next(count for count in range(1, gpus + 1) if modes(count, gpus)[0] == HOPPER)


@dataclass(frozen=True)
class RecordedVisits:
    """Visits in a run's events, all of which count.

    Parameters
    ----------
    numbers : mapping of str to set of int
        Numbers of the visits, by member.
    newest : int
        Number of the newest visit, even if it does not count; -1 if there was none.
    saved : mapping of str to set of int
        Newest visits in written checkpoints, by member; -1 for a checkpoint before any visit.
    """

    numbers: Mapping[str, Set[int]]
    newest: int
    saved: Mapping[str, Set[int]]

    def of(self, member: str) -> Set[int]:
        """Return the numbers of a member's visits."""
        return self.numbers.get(member, frozenset())

    def has_saved(self, member: str) -> bool:
        """Return true if a member has written a checkpoint from which it may continue."""
        return any(number < 0 or number in self.of(member) for number in self.saved.get(member, ()))


def recorded_visits(events: Iterable[Event]) -> RecordedVisits:
    """Return the visits in the events of a run."""
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    saved: defaultdict[str, set[int]] = defaultdict(set)
    newest = -1
    for event in events:
        if event.kind in ("visit", "visit_lost"):
            newest = max(newest, event.record.number)
        if event.kind == "visit":
            numbers[event.source].add(event.record.number)
        elif event.kind == "visits_undone":
            numbers[event.source].difference_update(event.record.numbers)
        elif event.kind == "checkpoint":
            saved[event.source].add(visit_in(PurePath(event.record.path).stem))
    return RecordedVisits(numbers, newest, saved)


def newest_states(
    spec: RunSpec, members: Iterable[str], recorded: RecordedVisits
) -> dict[str, TrainingState]:
    """Return the state of each member's newest checkpoint in the events, or of a fresh network.

    Checkpoints without an event are left out: a node that was given up may have saved an undone visit, or the
    driver may have died before it recorded the visit, which is then repeated.

    A member that has lost all its checkpoints does not begin anew: its state names the missing visit, and the
    rank that is to continue from it fails with an error that says so.
    """
    return {
        name: _newest(name, CheckpointFolder(checkpoint_folder(spec, name)), recorded) for name in members
    }


def _newest(member: str, folder: CheckpointFolder, recorded: RecordedVisits) -> TrainingState:
    visits = recorded.of(member)

    def is_known(state: TrainingState) -> bool:
        return state.visit < 0 or state.visit in visits or folder.is_of_parent(state)

    state = folder.newest_state(is_known)
    if state == TrainingState() and recorded.has_saved(member):
        return TrainingState(visit=max(visits, default=0))
    return state


def drop_leftovers(spec: RunSpec, members: Iterable[str]) -> None:
    """Delete incomplete checkpoints of killed ranks; no rank may be writing states of these members."""
    for name in members:
        CheckpointFolder(checkpoint_folder(spec, name)).drop_unfinished()


def next_number(spec: RunSpec, members: Iterable[str], recorded: RecordedVisits) -> int:
    """Return a number that no visit has, in events or in checkpoints."""
    folders = (CheckpointFolder(checkpoint_folder(spec, name)) for name in members)
    return max((recorded.newest, *(folder.newest_visit() for folder in folders))) + 1


def hop_progress(member: Member, state: TrainingState, partitions: int) -> HopProgress:
    """Return the progress of a member in a state."""
    history = tuple(epoch.metrics[member.stop.metric] for epoch in state.epochs)
    if len(state.visited) == partitions and not state.evaluating:
        return HopProgress(member, history, evaluating=True, visit=state.visit)
    return HopProgress(member, history, state.evaluating, state.visited, state.visit)
