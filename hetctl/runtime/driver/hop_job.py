"""The driver's part in hops: reports of agents and ranks become events, and commands become messages."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hetctl.methods.hopper.hop_commands import (
    Converge,
    FetchState,
    ForgetStates,
    HopCommand,
    ReportPlan,
    StartVisit,
    UndoVisits,
)
from hetctl.methods.hopper.hop_core import HopCore, HopRules, RunningVisit
from hetctl.methods.hopper.hop_events import (
    HopEvents,
    HopProgress,
    RankEnded,
    StateFetched,
    StateWritten,
    StoreLost,
    StoreOpened,
    VisitDone,
)
from hetctl.methods.hopper.hop_plans import HopPlanner
from hetctl.methods.hopper.modes import modes
from hetctl.methods.hopper.schedule import SearchOptions, Visit
from hetctl.methods.hopper.visit_trace import visits_to_repeat
from hetctl.model.ensemble import Member
from hetctl.model.events import DRIVER, Event
from hetctl.model.frameworks import FRAMEWORKS
from hetctl.model.hop_worker import gpus_in, node_of, worker_named
from hetctl.model.plan import HOPPER, Allocation, Placement
from hetctl.model.run import RunSpec
from hetctl.model.serialization import encode
from hetctl.model.training_progress import EpochResult
from hetctl.runtime.agent.messages import Fetched, StoreOrder
from hetctl.runtime.data.sharing.node_folder import run_key
from hetctl.runtime.driver.worker_pool import StoreReports, WorkerPool
from hetctl.runtime.worker.checkpoint import CheckpointFolder, TrainingState
from hetctl.runtime.worker.messages import StateSaved, VisitReport, VisitSpec
from hetctl.scheduling.observer import Observer
from hetctl.scheduling.planners.base import Options
from hetctl.storage.event_files import EventWriter, read_events
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_file import checkpoint_folder


class HopJob:
    """Visits of one job: their records in the event files, and the stores of the job's nodes.

    The driver alone writes these events: a member's ranks are on several nodes, and a file that two nodes
    append to may be damaged on a shared file system.

    Parameters
    ----------
    on_failure : callable
        Function called with the error of each event that cannot be written.
    """

    def __init__(self, folder: RunFolder, workers: WorkerPool, on_failure: Callable[[OSError], None]) -> None:
        self._folder = folder
        self._on_failure = on_failure
        self._workers = workers
        self._round = 0
        self._started: dict[str, StartVisit] = {}
        self._results: dict[tuple[str, int], EpochResult] = {}
        self._fetched: dict[tuple[str, str], Fetched] = {}
        self._written: dict[str, int] = {}

    def open(self, round_index: int) -> None:
        """Begin the round of all visits: the agents of all nodes start now."""
        self._round = round_index
        self._workers.start_agents()

    def start(self, command: StartVisit, rates: Mapping[int, float]) -> tuple[Allocation, VisitSpec]:
        """Record the start of a visit; return its allocation, and its specification for the ranks.

        Parameters
        ----------
        rates : mapping of int to float
            Expected rates of the member in samples/s, by number of GPUs.
        """
        visit = command.visit
        self._started[visit.config] = command
        gpus = gpus_in(visit.worker)
        place = Placement(node_of(visit.worker), gpus)
        spec = VisitSpec(state=command.state, checkpoint=command.checkpoint, **_place(visit))
        rate = rates.get(len(gpus), rates[1])
        return Allocation(visit.config, len(gpus), HOPPER, rate, (place,)), spec

    def take_written(self) -> Mapping[str, int]:
        """Return the lengths, in bytes, of members' event files that have grown since the last call."""
        written, self._written = {**self._workers.take_written(), **self._written}, {}
        return written

    def events(self, now_s: float) -> Iterator[HopEvents]:
        """Yield what agents and ranks have reported since the last call; record visits and checkpoints."""
        reports, self._workers.stores = self._workers.stores, StoreReports()
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

    def lose(self, running: RunningVisit, began_at: float, reason: str) -> None:
        """Record a visit that has ended without a new state.

        Parameters
        ----------
        began_at : float
            Its start, in seconds since the epoch.
        """
        times = {"began_at": began_at, "ended_at": time.time()}
        self._write(running.visit.config, "visit_lost", **_described(running.visit), **times, reason=reason)

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
            bytes=hop.size_bytes,
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
            bytes=saved.size_bytes,
            sha256=saved.sha256,
            duration_s=saved.duration_s,
        )
        # An epoch is finished once it is in a checkpoint.
        if result := self._results.pop((saved.member, saved.number), None):
            self._write(saved.member, "epoch", **encode(result), evaluate_s=0.0)
        return StateWritten(now_s, saved.member, saved.number)

    def execute(self, command: HopCommand) -> None:
        """Execute one of the commands `HOP_RECORDS`."""
        HOP_RECORDS[type(command)](self, command)

    def _fetch(self, command: FetchState) -> None:
        self._workers.fetch(command.node, command.state, command.source)

    def _forget(self, command: ForgetStates) -> None:
        self._workers.forget(command.states, command.nodes)

    def _undo(self, command: UndoVisits) -> None:
        for number in command.numbers:
            self._results.pop((command.member, number), None)
        self._write(command.member, "visits_undone", numbers=list(command.numbers), reason=command.reason)

    def _converge(self, command: Converge) -> None:
        self._write(command.member, "converged", reason=command.reason)

    def _report_plan(self, command: ReportPlan) -> None:
        self._write(DRIVER, "hop_plan", **encode(command))

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

    def _write(self, source: str, kind: str, **data: Any) -> None:
        def announce(length: int) -> None:
            if source != DRIVER:
                self._written[source] = length

        try:
            EventWriter(self._folder.events, source, self._round, announce).write(kind, **data)
        except OSError as error:
            self._on_failure(error)


HOP_RECORDS: Mapping[type, Callable[[HopJob, Any], None]] = {
    FetchState: HopJob._fetch,
    ForgetStates: HopJob._forget,
    UndoVisits: HopJob._undo,
    Converge: HopJob._converge,
    ReportPlan: HopJob._report_plan,
}
"""Commands that change nothing in the driver itself, with the functions that execute them."""


def hop_core(
    spec: RunSpec,
    options: Options,
    members: Mapping[str, Member],
    first_number: int,
    states: Mapping[str, TrainingState],
    observer: Observer,
) -> HopCore:
    """Return the scheduling of a job in which the members of a run hop.

    Parameters
    ----------
    members : mapping of str to Member
        Members that need training.
    states : mapping of str to TrainingState
        States of their newest checkpoints.
    """
    assert spec.ensemble.partitions is not None
    rules = HopRules(
        partitions=spec.ensemble.partitions.count,
        seed=options.seed,
        replay=visits_to_repeat(Path(spec.replay).read_text(encoding="utf-8")) if spec.replay else (),
        first_number=first_number,
        least_members=least_to_hop(spec.gpus) if spec.phases[-1] != HOPPER else 0,
    )
    count = spec.ensemble.partitions.count
    progress = [_progress(member, states[name], count) for name, member in members.items()]
    search = SearchOptions(seed=options.seed, seconds=options.plan_seconds)
    groups = all(map(find_spec, FRAMEWORKS[spec.ensemble.framework].packages))
    planner = HopPlanner(options.hop_scheduler, search, forms_groups=groups)
    return HopCore(rules, progress, planner, observer)


def least_to_hop(gpus: int) -> int:
    """Return the least number of members for which hopping is the mode of choice (CEREBRO, appendix 12)."""
    return next(count for count in range(1, gpus + 1) if modes(count, gpus)[0] == HOPPER)


def store_order(spec: RunSpec) -> StoreOrder | None:
    """Return the order for the stores of a run's nodes; None if its members do not hop."""
    partitions = spec.ensemble.partitions
    if HOPPER not in spec.phases or partitions is None:
        return None
    return StoreOrder(
        run_key(spec.run, spec.checkpoints), partitions.paths(), tuple(spec.site.network.control)
    )


@dataclass(frozen=True)
class RecordedVisits:
    """Visits that a run's events have, each of which counts.

    Parameters
    ----------
    numbers : mapping of str to set of int
        Their numbers, by member.
    newest : int
        Number of the newest visit, whether it counts or not; -1 if there was none.
    """

    numbers: Mapping[str, Set[int]]
    newest: int

    def of(self, member: str) -> Set[int]:
        """Return the numbers of a member's visits."""
        return self.numbers.get(member, frozenset())


def recorded_visits(folder: RunFolder) -> RecordedVisits:
    """Return the visits in the events of a run."""
    return _recorded(events_in(folder))


def _recorded(events: Iterable[Event]) -> RecordedVisits:
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    newest = -1
    for event in events:
        if event.kind in ("visit", "visit_lost"):
            newest = max(newest, int(event.data["number"]))
        if event.kind == "visit":
            numbers[event.source].add(int(event.data["number"]))
        elif event.kind == "visits_undone":
            numbers[event.source].difference_update(event.data["numbers"])
    return RecordedVisits(numbers, newest)


def newest_states(
    spec: RunSpec, members: Iterable[str], recorded: RecordedVisits
) -> dict[str, TrainingState]:
    """Return the states of the newest checkpoints that the events have; that of a fresh network without one.

    Others are left out. A node that was given up may save a visit that was undone, and a rank one that its
    driver did not live to record; such a visit is repeated.
    """
    folders = {name: CheckpointFolder(checkpoint_folder(spec, name)) for name in members}
    return {name: _newest(folder, recorded.of(name)) for name, folder in folders.items()}


def _newest(folder: CheckpointFolder, recorded: Set[int]) -> TrainingState:
    def is_known(state: TrainingState) -> bool:
        return state.visit < 0 or state.visit in recorded or folder.is_of_parent(state)

    return folder.newest_state(is_known)


def progress_of(folder: RunFolder, spec: RunSpec, member: Member) -> HopProgress:
    """Return the progress of a trial that joins the hops, by its own events and its newest checkpoint."""
    assert spec.ensemble.partitions is not None
    recorded = _recorded(read_events(folder.events_of(member.name)))
    state = newest_states(spec, [member.name], recorded)[member.name]
    return _progress(member, state, spec.ensemble.partitions.count)


def next_number(spec: RunSpec, members: Iterable[str], recorded: RecordedVisits) -> int:
    """Return a number that no visit has, not even one that is in a checkpoint alone."""
    folders = (CheckpointFolder(checkpoint_folder(spec, name)) for name in members)
    return max((recorded.newest, *(folder.newest_visit() for folder in folders))) + 1


def _progress(member: Member, state: TrainingState, partitions: int) -> HopProgress:
    history = tuple(epoch.metrics[member.stop.metric] for epoch in state.epochs)
    if len(state.visited) == partitions and not state.evaluating:
        return HopProgress(member, history, evaluating=True, visit=state.visit)
    return HopProgress(member, history, state.evaluating, state.visited, state.visit)


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
