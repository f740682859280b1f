"""Hops in a job: reports of agents and ranks become events, and commands become messages and records."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hetctl.methods.hopper.hop_commands import (
    Converge,
    FetchState,
    ForgetStates,
    OpenHops,
    ReportPlan,
    StartVisit,
    UndoVisits,
)
from hetctl.methods.hopper.hop_core import HopCore, RunningVisit
from hetctl.methods.hopper.hop_events import (
    HopEvents,
    MemberJoined,
    RankEnded,
    StateFetched,
    StateWritten,
    StoreLost,
    StoreOpened,
    VisitDone,
)
from hetctl.methods.hopper.hop_plans import HopPlanner
from hetctl.methods.hopper.hop_start import HopRules
from hetctl.methods.hopper.modes import modes
from hetctl.methods.hopper.schedule import SearchOptions, visits_to_repeat
from hetctl.model.events import DRIVER
from hetctl.model.exit_reason import ExitReason
from hetctl.model.frameworks import FRAMEWORKS
from hetctl.model.hops import Visit, gpus_in, node_of, worker_named
from hetctl.model.plan import HOPPER, Allocation, Placement
from hetctl.model.run import RunSpec
from hetctl.model.serialization import encode
from hetctl.model.training_progress import EpochResult
from hetctl.runtime.agent.messages import Fetched, StoreOrder
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
from hetctl.runtime.driver.rank_pool import StoreReports
from hetctl.runtime.worker.checkpoint import TrainingState
from hetctl.runtime.worker.messages import StateSaved, VisitReport, VisitSpec
from hetctl.scheduling.events import TaskEnded
from hetctl.storage.patience import PATIENT

TRIALS_EVERY_S = 1.0
"""Seconds between two checks for trials that a search asks for while no visit ends."""


class HopJob(JobMode):
    """Visits of one job: their records in the event files, and the stores of the job's nodes.

    The driver alone writes these events: a member's ranks are on several nodes, and a file that two nodes
    append to may be damaged on a shared file system.
    """

    def __init__(self, job: JobContext) -> None:
        super().__init__(job)
        self.executors = {
            OpenHops: self._open,
            StartVisit: self._start,
            FetchState: self._fetch,
            ForgetStates: self._forget,
            UndoVisits: self._undo,
            Converge: self._converge,
            ReportPlan: self._report_plan,
        }
        self._round = 0
        self._started: dict[str, StartVisit] = {}
        self._results: dict[tuple[str, int], EpochResult] = {}
        self._fetched: dict[tuple[str, str], Fetched] = {}
        self._asked: dict[str, int] = {}
        self._next_trials = 0.0
        job.rank_pool.open_stores(_store_order(job.spec))

    def core(self) -> HopCore:
        """Begin the hops: return their scheduling, for members in the states of their newest checkpoints."""
        job = self.job
        observer = job.observer(job.planner)
        left = observer.left(job.now_s)
        drop_leftovers(job.spec, left)
        recorded = recorded_visits(job.folder)
        states = newest_states(job.spec, left, recorded)
        number = next_number(job.spec, left, recorded)
        self.reconcile(states, job.members.epochs(left), recorded)
        # Those whose last job ended in the middle of a data-parallel epoch go on with the next phase.
        fit = [name for name in left if not states[name].is_within_epoch]
        self._asked = dict(job.members.asked())
        assert job.spec.ensemble.partitions is not None
        count = job.spec.ensemble.partitions.count
        progress = [
            hop_progress(member, states[member.name], count) for member in job.members.as_they_are(fit)
        ]
        return HopCore(self._rules(count, number), progress, self._planner(), observer)

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

        The last driver may have been killed between a checkpoint and its event, or before the checkpoint of
        a visit was written.

        Parameters
        ----------
        epochs : mapping of str to int
            Finished epochs by events.
        """
        for name, state in states.items():
            lost = sorted(number for number in recorded.of(name) if number > state.visit)
            if lost:
                self._write(name, "visits_undone", numbers=lost, reason="no checkpoint has them")
            if len(state.epochs) > epochs[name]:
                self._write(name, "epoch", **encode(state.epochs[-1]))

    def reports(self) -> Iterator[HopEvents]:
        """Yield what agents and ranks have reported since the last call; record visits and checkpoints."""
        for event in self._events(self.job.now_s):
            yield event
            self._next_trials = 0.0

    def _events(self, now_s: float) -> Iterator[HopEvents]:
        rank_pool = self.job.rank_pool
        reports, rank_pool.stores = rank_pool.stores, StoreReports()
        for node, fetched in reports.fetched:
            self._fetched[node, fetched.name] = fetched
            yield StateFetched(now_s, node, fetched.name, fetched.error)
        for visited in reports.visited:
            # A rank that was given up may report a visit that was started again elsewhere.
            if visited.number == self._started[visited.member].visit.number:
                yield self._done(visited, now_s)
        for saved in reports.saved:
            yield self._saved(saved, now_s)
        for node, gpu in reports.ended:
            yield RankEnded(now_s, worker_named(node, (gpu,)))
        # After what the lost agents have reported, and before what the next ones report.
        for node in reports.lost:
            yield StoreLost(now_s, node)
        for node, partitions in reports.opened:
            yield StoreOpened(now_s, node, partitions)

    def arrivals(self, *, some_ended: bool) -> Iterator[MemberJoined]:
        """Yield the trials that a search has asked for; other scheduling looks for itself."""
        job = self.job
        if job.spec.ensemble.search is None or (not some_ended and time.monotonic() < self._next_trials):
            return
        self._next_trials = time.monotonic() + TRIALS_EVERY_S
        asked = job.members.asked()
        new = [name for name, epochs in asked.items() if epochs > self._asked.get(name, 0)]
        for member in job.members.as_they_are(new):
            progress = PATIENT.call(progress_of, job.folder, job.spec, member)
            yield MemberJoined(job.now_s, progress)
        self._asked.update(asked)

    def on_task_ended(self, running: Any, reason: str) -> None:
        """Record a visit that has ended without a new state."""
        if isinstance(running, RunningVisit) and not running.done:
            times = {"began_at": self.job.members.began_at + running.since_s, "ended_at": time.time()}
            self._write(
                running.visit.config, "visit_lost", **_described(running.visit), **times, reason=reason
            )

    def _open(self, command: OpenHops) -> None:
        """Begin the round of all visits: the agents of all nodes start now."""
        job = self.job
        try:
            job.rounds[command.round] = job.launcher.open_visits(command.round, command.members)
            self._round = command.round
            PATIENT.call(job.rank_pool.start_agents)
        except OSError as error:
            job.on_failure(error)

    def _start(self, command: StartVisit) -> None:
        """Record the start of a visit, and start it; report one that cannot be launched as ended."""
        job, visit = self.job, command.visit
        name, opened = visit.config, job.rounds[command.round]
        (member,) = job.members.as_they_are([name])
        self._started[name] = command
        allocation = _allocation_of(visit, job.members.rates(name))
        spec = VisitSpec(state=command.state, checkpoint=command.checkpoint, **_place(visit))
        try:
            job.launcher.visit(opened, allocation, spec, member)
        except OSError as error:
            job.on_failure(error)
        if name not in opened.active:
            job.send(TaskEnded(job.now_s, name, ExitReason.NOT_LAUNCHED))

    def _fetch(self, command: FetchState) -> None:
        self.job.rank_pool.fetch(command.node, command.state, command.source)

    def _forget(self, command: ForgetStates) -> None:
        self.job.rank_pool.forget(command.states, command.nodes)

    def _undo(self, command: UndoVisits) -> None:
        for number in command.numbers:
            self._results.pop((command.member, number), None)
        self._write(command.member, "visits_undone", numbers=list(command.numbers), reason=command.reason)

    def _converge(self, command: Converge) -> None:
        self._write(command.member, "converged", reason=command.reason)

    def _report_plan(self, command: ReportPlan) -> None:
        self._write(DRIVER, "hop_plan", **encode(command))

    def _done(self, report: VisitReport, now_s: float) -> VisitDone:
        command = self._started[report.member]
        visit = command.visit
        hop = self._fetched.pop((node_of(visit.worker), command.state or ""), Fetched(""))
        self._write(
            report.member,
            "visit",
            **_described(visit),
            began_at=report.began_at,
            ended_at=report.ended_at,
            meet_s=report.meet_s,
            waited_s=report.waited_s,
            restore_s=report.restore_s,
            train_s=report.train_s,
            save_s=report.save_s,
            hop_s=hop.duration_s,
            bytes=hop.bytes,
            samples=report.samples,
            loss=report.loss,
        )
        if report.result is None:
            return VisitDone(now_s, report.member, report.number, report.state)
        self._results[report.member, report.number] = report.result
        return VisitDone(now_s, report.member, report.number, report.state, report.result.metrics)

    def _saved(self, saved: StateSaved, now_s: float) -> StateWritten:
        self._write(
            saved.member,
            "checkpoint",
            epoch=saved.epochs,
            part_samples=saved.part_samples,
            path=saved.path,
            bytes=saved.bytes,
            sha256=saved.sha256,
            duration_s=saved.duration_s,
        )
        # An epoch is finished once it is in a checkpoint.
        if result := self._results.pop((saved.member, saved.number), None):
            self._write(saved.member, "epoch", **encode(result), evaluate_s=0.0)
        return StateWritten(now_s, saved.member, saved.number)

    def _write(self, source: str, kind: str, **data: Any) -> None:
        def announce(length: int) -> None:
            if source != DRIVER:
                self.job.rank_pool.note_written(source, length)

        self.job.events.writer(source, self._round, announce).write(kind, **data)


def least_to_hop(gpus: int) -> int:
    """Return the least number of members for which hopping is the mode of choice (CEREBRO, appendix 12)."""
    return next(count for count in range(1, gpus + 1) if modes(count, gpus)[0] == HOPPER)


def _store_order(spec: RunSpec) -> StoreOrder:
    """Return the order for the stores of a run's nodes."""
    assert spec.ensemble.partitions is not None
    paths = spec.ensemble.partitions.paths()
    return StoreOrder(run_key(spec.run, spec.checkpoints), paths, tuple(spec.site.network.control))


def _allocation_of(visit: Visit, rates: Mapping[int, float]) -> Allocation:
    """Return the GPUs of a visit, with the member's expected rate on so many, in samples/s."""
    gpus = gpus_in(visit.worker)
    place = Placement(node_of(visit.worker), gpus)
    return Allocation(visit.config, len(gpus), HOPPER, rates.get(len(gpus), rates[1]), (place,))


def _place(visit: Visit) -> dict[str, Any]:
    """Return number, epoch (counted from 1), partition and kind of a visit."""
    return {
        "number": visit.number,
        "epoch": visit.epoch // 2 + 1,
        "partition": int(visit.partition.removeprefix("p")),
        "evaluates": visit.epoch % 2 == 1,
    }


def _described(visit: Visit) -> dict[str, Any]:
    return {**_place(visit), "worker": visit.worker}
