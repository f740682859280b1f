"""Hops in a job: turns reports of agents and ranks into events, and commands into messages and records."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
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
from hetctl.model.events import DRIVER
from hetctl.model.hops import HopPlanMade, StateFetched, StateSaved, Visit, VisitEnd, node_of
from hetctl.model.plan import HOPPER
from hetctl.model.run import RunSpec
from hetctl.model.serialization import encode
from hetctl.model.training_progress import NO_BEST, BestCheckpoint, EpochResult
from hetctl.model.training_settings import FRAMEWORKS
from hetctl.runtime.agent.messages import StoreOrder
from hetctl.runtime.data.sharing.node_folder import run_key
from hetctl.runtime.driver.hop_history import (
    RecordedVisits,
    drop_leftovers,
    hop_progress,
    newest_states,
    next_number,
    progress_of,
    recorded_visits,
)
from hetctl.runtime.driver.job_modes import JobContext, JobMode
from hetctl.runtime.worker.checkpoint import TrainingState
from hetctl.scheduling.job_scheduler import RunningTask
from hetctl.storage.patience import PATIENT

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

    def __init__(self, job: JobContext) -> None:
        super().__init__(job)
        agents = job.rank_pool.agents
        self.executors = {
            OpenHops: self._open,
            FetchState: lambda command: agents.fetch(command.node, command.state, command.source),
            ForgetStates: lambda command: agents.forget(command.states, command.nodes),
            UndoVisits: self._undo,
            Converge: lambda command: self._write(command.member, "converged", reason=command.reason),
            HopPlanMade: lambda command: self._write(DRIVER, "hop_plan", **encode(command)),
        }
        # Agents that start from now on open stores.
        agents.store = _store_order(job.spec)
        self._round = 0
        self._running: Mapping[str, RunningTask] = {}
        self._results: dict[tuple[str, int], EpochResult] = {}
        self._best: dict[str, BestCheckpoint] = {}
        self._fetched: dict[tuple[str, str], StateFetched] = {}
        self._asked: dict[str, int] = {}
        self._next_trials = 0.0

    def scheduler(self) -> HopScheduler:
        """Begin the hops, from the members' newest checkpoints; return their scheduling."""
        job = self.job
        observer = job.observer(job.planner)
        left = observer.left(job.now_s)
        drop_leftovers(job.spec, left)
        recorded = recorded_visits(job.folder)
        states = newest_states(job.spec, left, recorded)
        number = next_number(job.spec, left, recorded)
        self.reconcile(states, job.members.epochs(left), recorded)
        # Members within a data-parallel epoch go on in the next phase.
        fit = [name for name in left if not states[name].is_within_epoch]
        self._asked = dict(job.members.asked())
        assert job.spec.ensemble.partitions is not None
        count = job.spec.ensemble.partitions.count
        progress = [
            hop_progress(member, states[member.name], count) for member in job.members.with_batch_sizes(fit)
        ]
        scheduler = HopScheduler(self._rules(count, number), progress, self._planner(), observer)
        self._running = scheduler.running
        return scheduler

    def _rules(self, partitions: int, first_number: int) -> HopRules:
        spec = self.job.spec
        return HopRules(
            partitions=partitions,
            seed=self.job.options.seed,
            replay=visits_to_repeat(Path(spec.replay).read_text(encoding="utf-8")) if spec.replay else (),
            first_number=first_number,
            least_members=least_to_hop(spec.gpus) if spec.phases[-1] != HOPPER else 0,
        )

    def _planner(self) -> HopPlanner:
        options, framework = self.job.options, FRAMEWORKS[self.job.spec.ensemble.framework]
        search = SearchOptions(seed=options.seed, seconds=options.solver_time_limit_s)
        return HopPlanner(options.hop_scheduler, search, forms_groups=all(map(find_spec, framework.packages)))

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
        rank_pool = self.job.rank_pool
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
        job = self.job
        if job.spec.ensemble.search is None or (not some_ended and time.monotonic() < self._next_trials):
            return
        self._next_trials = time.monotonic() + TRIALS_EVERY_S
        asked = job.members.asked()
        new = [name for name, epochs in asked.items() if epochs > self._asked.get(name, 0)]
        for member in job.members.with_batch_sizes(new):
            yield PATIENT.call(progress_of, job.folder, job.spec, member)
        self._asked.update(asked)

    def on_task_ended(self, running: RunningTask, reason: str) -> None:
        """Record a visit that ended without a new state."""
        if (visit := running.task.visit) and not running.done:
            lost = visit.ended(self.job.members.began_at + running.since_s, time.time(), reason=reason)
            self._write(visit.config, "visit_lost", **{name: getattr(lost, name) for name in LOST_FIELDS})

    def _open(self, command: OpenHops) -> None:
        """Begin the round of all visits; the agents of all nodes start now."""
        self._round = command.round
        self.job.rounds.open(command.round, command.members)
        try:
            PATIENT.call(self.job.rank_pool.start_agents)
        except OSError as error:
            self.job.on_failure(error)

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
                self.job.rank_pool.note_written(source, length)

        self.job.events.writer(source, self._round, announce).write(kind, **data)


def least_to_hop(gpus: int) -> int:
    """Return the least number of members for which hopping is preferable (CEREBRO, appendix 12)."""
    return next(count for count in range(1, gpus + 1) if modes(count, gpus)[0] == HOPPER)


def _store_order(spec: RunSpec) -> StoreOrder:
    assert spec.ensemble.partitions is not None
    paths = spec.ensemble.partitions.paths()
    return StoreOrder(run_key(spec.run, spec.checkpoints), paths, tuple(spec.site.network.control))
