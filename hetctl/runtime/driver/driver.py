"""The driver of one batch job: executes what its scheduling decides from the events of its ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from hetctl.methods.hopper.hop_commands import HopCommand, OpenHops, StartVisit
from hetctl.methods.hopper.hop_core import HopCore, RunningVisit
from hetctl.methods.hopper.hop_events import HopEvents, MemberJoined
from hetctl.methods.pipeline.layouts import Layouts, pipeline_planner
from hetctl.model.events import DRIVER
from hetctl.model.exit_reason import ExitReason
from hetctl.model.plan import BALANCED, DATA_PARALLEL, HOPPER, PIPELINE
from hetctl.model.run import RunSpec
from hetctl.model.serialization import encode
from hetctl.model.site import MEMBERS
from hetctl.model.workload import Workload
from hetctl.runtime.best_effort_io import disk_error_reason, log_line
from hetctl.runtime.data.stage_in import stage_orders
from hetctl.runtime.driver.active_round import ActiveRound
from hetctl.runtime.driver.exit_causes import failed_nodes
from hetctl.runtime.driver.hop_job import (
    HOP_RECORDS,
    HopJob,
    hop_core,
    newest_states,
    next_number,
    progress_of,
    recorded_visits,
    store_order,
)
from hetctl.runtime.driver.job_nodes import nodes_of_this_job
from hetctl.runtime.driver.phased_core import PhasedCore
from hetctl.runtime.driver.round_launcher import Exchanges, RoundLauncher
from hetctl.runtime.driver.run_members import RunMembers, RunObserver
from hetctl.runtime.driver.running_task import EndedGroup
from hetctl.runtime.driver.trial_queue import TrialQueue
from hetctl.runtime.driver.worker_pool import WorkerPool
from hetctl.scheduling.commands import AskAgain, Command, EndJob, EndRound, Start, Stop
from hetctl.scheduling.core import POLL_S, Core, JobOptions
from hetctl.scheduling.events import (
    EpochDone,
    JobEnding,
    JobOpened,
    NodeJoined,
    NodeLost,
    SchedulingEvent,
    StepEnded,
    StepSignalled,
    StepStarted,
    Tick,
)
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Options, Planner, options_from
from hetctl.storage.event_files import BestEffortEventWriter
from hetctl.storage.heartbeats import write_heartbeats
from hetctl.storage.kept_modules import with_kept_modules
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_file import read_planner_state, read_spec

SIGNAL_DELAY_S = 0.5
RATES_EVERY_S = 2.0
"""Seconds between two checks of the rates of members in training, for planners that may resize them."""
TRIALS_EVERY_S = 1.0
"""Seconds between two looks for trials that a search asks for while no visit ends."""
HEARTBEATS_EVERY_S = 2.0
"""Seconds between two versions of the file of heartbeats."""
STATE_EVERY_S, STATE_SHARE = 60.0, 0.01
"""Seconds between two snapshots of the run's state, and largest share of the driver's time spent on them."""
TERMINATE_SHARE, KILL_SHARE = 0.6, 0.85
"""Shares of the grace period after which steps that still run are terminated (SIGTERM), and killed."""


class Driver:
    """Process that sends a job's events to its scheduling (`Core`) and executes the commands.

    One driver runs in each allocation. Members that start together are a round. Times in the scheduling count
    from the start of the run.

    Parameters
    ----------
    job : int
        Number of the job in its run.
    deadline : float
        End of all training, in seconds since the epoch.
    batch_id : str
        Job number of the batch system.
    signal_delay_s : float
        Seconds within which the driver receives its signal after the batch system has signalled a step.
    """

    def __init__(
        self,
        folder: RunFolder,
        job: int,
        deadline: float,
        batch_id: str = "",
        signal_delay_s: float = SIGNAL_DELAY_S,
    ) -> None:
        self._folder = folder
        self._files = folder.job(job)
        # Jobs that were killed leave files that are of use only while they run.
        for earlier in range(job):
            folder.job(earlier).clear()
        self._spec: RunSpec = with_kept_modules(read_spec(folder), folder)
        self._job = job
        self._end_reason: str | None = None
        self._batch_id = batch_id
        self._signal_delay_s = signal_delay_s
        self._planner = planner_named(self._spec.planner)
        options = options_from(self._spec.options)
        nodes = nodes_of_this_job(self._spec.site, self._spec.gpus)
        self._nodes = [node.name for node in nodes]
        self._returned: list[str] = []
        self._workers = WorkerPool(
            *(self._spec.site, nodes, self._files.agents, self._spec.ensemble.preloaded),
            stages=stage_orders(self._spec.ensemble.partitions, self._nodes),
            store=store_order(self._spec),
        )
        self._exchanges = Exchanges(self._spec.site, self._files)
        self._busy_s = {p.member: p.startup_s + p.evaluate_s + p.checkpoint_s for p in self._spec.profiles}
        self._hops: HopJob | None = None
        self._hopping: dict[str, int] = {}
        if HOPPER in self._spec.phases:
            self._hops = HopJob(folder, self._workers, self._end_by_disk)
        take_written = (self._hops or self._workers).take_written
        self._open: dict[int, ActiveRound] = {}
        self._trials = self._trial_queue()
        self._members = RunMembers(
            *(folder, self._spec, self._workers.gpus, take_written), trials=self._trials
        )
        self._began_at = self._members.began_at
        first_round = self._members.next_round
        # On a full disk the driver goes on, since trainers must still be told to stop.
        self._events = BestEffortEventWriter(folder.events, DRIVER, first_round, self._end_by_disk)
        self._deadline = deadline
        self._opened = JobOpened(
            now_s=self._now_s(),
            nodes=self._workers.nodes,
            deadline_s=deadline - self._began_at,
            first_round=first_round,
            planner_state=read_planner_state(folder),
        )
        self._launcher = RoundLauncher(
            *(folder, self._spec, job, deadline, self._opened.longest_s),
            *(self._workers, self._exchanges, self._end_by_disk),
        )
        self._core: Any = self._first_core(options)
        self._next_rates = 0.0
        self._next_heartbeats = 0.0
        self._next_trials = 0.0
        self._next_state = time.monotonic() + STATE_EVERY_S
        self._ended_by: str | None = None

    def _trial_queue(self) -> TrialQueue | None:
        if self._spec.ensemble.search is None:
            return None
        return TrialQueue(
            *(self._folder, self._spec, self._workers.gpus),
            lambda name: any(name in opened.active for opened in self._open.values()),
            self._end_by_disk,
        )

    def _first_core(self, options: Options) -> Any:
        makers = [partial(_CORES[phase], self, options) for phase in self._spec.phases]
        return PhasedCore(makers) if len(makers) > 1 else makers[0]()

    def _round_core(self, options: Options) -> Core:
        return Core(self._planner, options, JobOptions(), self._observer(self._planner, options))

    def _pipeline_core(self, options: Options) -> Core:
        like = {} if self._trials is None else {"planned_like": self._trials.planned_like}
        planner = pipeline_planner(Layouts(self._spec.pipelines, **like).find)
        return Core(planner, options, JobOptions(), self._observer(planner, options, pipelines=True))

    def _hop_core(self, options: Options) -> HopCore:
        assert self._hops is not None
        observer = self._observer(self._planner, options)
        left = observer.left(self._now_s())
        recorded = recorded_visits(self._folder)
        states = newest_states(self._spec, left, recorded)
        number = next_number(self._spec, left, recorded)
        self._hops.reconcile(states, self._members.epochs(left), recorded)
        # Those whose last job ended in the middle of a data-parallel epoch go on with the next phase.
        fit = [name for name in left if not states[name].is_within_epoch]
        active = {member.name: member for member in self._members.as_they_are(fit)}
        self._hopping = dict(self._members.asked())
        return hop_core(self._spec, options, active, number, states, observer)

    def _observer(self, planner: Planner, options: Options, *, pipelines: bool = False) -> RunObserver:
        def order(workload: Workload) -> Any:
            return planner.order(workload, options)

        piped = frozenset(self._spec.pipelines)
        only = piped if pipelines else frozenset(m.name for m in self._spec.ensemble.members) - piped
        return RunObserver(self._spec.budget, self._members, self._workers, self._open, order, only)

    def run(self) -> str:
        """Run rounds until no work is left or the job has to end; return the reason of the end."""
        self._events.write(
            "job_started",
            job=self._job,
            batch_id=self._batch_id,
            nodes=encode(self._workers.nodes),
            deadline=self._deadline,
        )
        self._send(self._opened)
        while not (reason := self._ended_by):
            self._process_ends()
            self._report_staged()
            self._enforce_stops()
            self._report_rates()
            self._write_heartbeats()
            self._keep_state()
            self._schedule()
        self._workers.leave()
        self._exchanges.leave()
        # Files that are of use only while a job runs must not count against a quota of files later.
        self._files.heartbeats.unlink(missing_ok=True)
        self._events.write("job_ended", job=self._job, reason=reason)
        self._next_state = 0.0
        self._keep_state()
        return reason

    def end(self, reason: str) -> None:
        """Start no more rounds; the first reason stands. Signal handlers call this at any moment."""
        self._end_reason = self._end_reason or reason

    def _end_by_disk(self, error: OSError) -> None:
        reason = disk_error_reason(error)
        if self._end_reason is None:
            log_line(f"the job ends: {reason} ({error})")
        self.end(reason)

    def _now_s(self) -> float:
        return time.time() - self._began_at

    def _send(self, event: SchedulingEvent | HopEvents) -> None:
        self._execute(self._core.handle(event))

    def _schedule(self) -> None:
        try:
            self._execute(self._core.schedule(self._now_s()))
        except OSError as error:
            self._end_by_disk(error)
        if self._ended_by is None:
            # Messages end the wait: a sleep of 50 ms cost each rank that was
            # done 25 ms on average, this 0.5 to 2 ms.
            self._workers.wait(POLL_S)

    def _process_ends(self) -> None:
        """Process ended steps first, then the end of the job: a step may get the signal before the driver."""
        ended = self._workers.reap()
        self._exchanges.reap()
        if not self._core.ending and any(step.got_sigterm for step in ended):
            # A batch system that ends a job signals steps and driver in any order.
            time.sleep(self._signal_delay_s)
        self._send(Tick(self._now_s()))
        self._report_joined_nodes()
        self._report_hops()
        self._watch_for_the_end()
        for name in (*self._workers.signalled(), *(step.name for step in ended if step.signalled)):
            self._send(StepSignalled(self._now_s(), name))
        for step in ended:
            self._close_step(step)
        self._report_lost_nodes()
        self._record_returns()
        self._report_trials(bool(ended))

    def _watch_for_the_end(self) -> None:
        """Report the end of the job; its script receives the batch system's signals and writes a file."""
        # On a full disk the script can create the file, but write nothing into it.
        if (stop_file := self._files.stop).exists():
            self.end(stop_file.read_text(encoding="utf-8").strip() or "signal")
        if self._end_reason and not self._core.ending:
            self._send(JobEnding(self._now_s(), self._end_reason))

    def _report_joined_nodes(self) -> None:
        """Report nodes whose agents connect late or again to the scheduling, before what these agents report.

        A node whose agent has died and is back at once was never lost to the scheduling.
        """
        for node in [node for node in self._workers.nodes if node.name not in self._nodes]:
            self._nodes.append(node.name)
            self._send(NodeJoined(self._now_s(), node))

    def _report_lost_nodes(self) -> None:
        """Report lost nodes to the scheduling, after the ends of the steps on them."""
        present = {node.name for node in self._workers.nodes}
        for name in [name for name in self._nodes if name not in present]:
            self._nodes.remove(name)
            self._send(NodeLost(self._now_s(), name))

    def _record_returns(self) -> None:
        """Record the nodes that are used again, after the ends of the steps that were lost with them."""
        for node in dict.fromkeys((*self._workers.take_returned(), *self._returned)):
            self._events.write("node_joined", job=self._job, node=node)
        self._returned = []

    def _close_step(self, step: EndedGroup) -> None:
        """Report the end of a step to the scheduling, and nodes that failed with it."""
        running = self._core.running[step.name]
        open_round = self._open[running.round]
        why = open_round.close(step, self._members.peak_memory(step.name))
        if self._hops and isinstance(running, RunningVisit) and not running.done:
            self._hops.lose(running, self._began_at + running.since_s, why.value)
        no_room = step.exit_code == 0 and open_round.had_no_room(step.name)
        if why is ExitReason.NODE_FAILURE:
            self._report_failed_nodes(step)
        self._send(StepEnded(self._now_s(), step.name, why, no_room))
        if why is ExitReason.NODE_FAILURE and (not step.lost_nodes or self._spec.site.launch == MEMBERS):
            # Named by the launcher, or still needed: Slurm starts no more steps in a job that lost a node.
            self._send(JobEnding(self._now_s(), why.value))

    def _report_failed_nodes(self, step: EndedGroup) -> None:
        placed = (place.node for place in step.placement)
        nodes = step.lost_nodes or failed_nodes(step.output, placed)
        self._events.write("node_failed", job=self._job, member=step.name, nodes=list(nodes))
        # A group on several nodes may end after one of them has returned.
        self._returned += [node.name for node in self._workers.nodes if node.name in step.lost_nodes]

    def _report_hops(self) -> None:
        """Report what agents and ranks say of visits: their ends come before those of their steps."""
        for event in self._hops.events(self._now_s()) if self._hops else ():
            self._send(event)
            self._next_trials = 0.0

    def _report_trials(self, some_ended: bool) -> None:
        """Report the trials that a search has asked for to the hops; other scheduling looks for itself."""
        searches = self._hops is not None and self._spec.ensemble.search is not None
        if not searches or (not some_ended and time.monotonic() < self._next_trials):
            return
        self._next_trials = time.monotonic() + TRIALS_EVERY_S
        asked = self._members.asked()
        new = [name for name, epochs in asked.items() if epochs > self._hopping.get(name, 0)]
        for member in self._members.as_they_are(new):
            self._send(MemberJoined(self._now_s(), progress_of(self._folder, self._spec, member)))
        self._hopping.update(asked)

    def _report_staged(self) -> None:
        for node, staged in self._workers.take_staged():
            self._events.write(
                "parts_staged",
                job=self._job,
                node=node,
                copied=list(staged.copied),
                kept=list(staged.kept),
                bytes=staged.size_bytes,
                duration_s=staged.duration_s,
                errors=list(staged.errors),
            )

    def _report_rates(self) -> None:
        if self._planner.paradigm != "elastic" or time.monotonic() < self._next_rates:
            return
        self._next_rates = time.monotonic() + RATES_EVERY_S
        for name, rate in self._members.rates_seen(self._open.values()).items():
            self._send(EpochDone(self._now_s(), name, rate))

    def _write_heartbeats(self) -> None:
        """Write the state of members in training for `hetctl status`; errors of a full disk are ignored."""
        if time.monotonic() < self._next_heartbeats:
            return
        self._next_heartbeats = time.monotonic() + HEARTBEATS_EVERY_S
        with suppress(OSError):
            write_heartbeats(self._files.heartbeats, self._workers.heartbeats())

    def _keep_state(self) -> None:
        """Save a snapshot, which spares readers work; without it they are only slower: errors are ignored."""
        began = time.monotonic()
        if began < self._next_state:
            return
        with suppress(OSError):
            self._members.keep()
        spent_s = time.monotonic() - began
        self._next_state = began + max(STATE_EVERY_S, spent_s / STATE_SHARE)

    def _execute(self, commands: Sequence[Command | HopCommand]) -> None:
        for command in commands:
            _EXECUTORS[type(command)](self, command)

    def _open_hops(self, command: OpenHops) -> None:
        assert self._hops is not None
        try:
            self._open[command.round] = self._launcher.open_hops(command.round, command.members)
            self._hops.open(command.round)
        except OSError as error:
            self._end_by_disk(error)

    def _start_visit(self, command: StartVisit) -> None:
        """Start a visit; report one that cannot be launched as ended."""
        assert self._hops is not None
        name, opened = command.visit.config, self._open[command.round]
        (member,) = self._members.as_they_are([name])
        try:
            self._launcher.visit(opened, *self._hops.start(command, self._members.rates(name)), member)
        except OSError as error:
            self._end_by_disk(error)
        now_s = self._now_s()
        if name in opened.active:
            self._send(StepStarted(now_s, name, now_s))
        else:
            self._send(StepEnded(now_s, name, ExitReason.NOT_LAUNCHED))

    def _tell_hops(self, command: HopCommand) -> None:
        assert self._hops is not None
        self._hops.execute(command)

    def _start(self, command: Start) -> None:
        """Start a round; report members that cannot be launched as ended."""
        allocations = [task.allocation for task in command.tasks]
        started: set[str] = set()
        try:
            members = self._members.as_they_are(allocation.member for allocation in allocations)
            planned = command.predicted_s, command.planner_state
            opened = self._launcher.open(command.round, allocations, members, *planned)
            self._open[command.round] = opened
            started = set(opened.active)
        except OSError as error:
            self._end_by_disk(error)
        for task in command.tasks:
            if task.name in started:
                now_s = self._now_s()
                self._send(StepStarted(now_s, task.name, now_s))
            else:
                self._send(StepEnded(self._now_s(), task.name, ExitReason.NOT_LAUNCHED))

    def _stop(self, command: Stop) -> None:
        open_round = self._open.get(command.round)
        busy_s = {} if command.at_once else self._busy_s
        if open_round is None:
            return  # The round could not be opened.
        if command.member is None:
            open_round.stop(command.reason, busy_s)
        else:
            open_round.stop_member(command.member, command.reason, busy_s)

    def _end_round(self, command: EndRound) -> None:
        if open_round := self._open.pop(command.round, None):
            open_round.end(command.reason)

    def _end_job(self, command: EndJob) -> None:
        self._ended_by = command.reason

    def _poll(self, _command: AskAgain) -> None:
        """Do nothing: the main loop polls often enough."""

    def _enforce_stops(self) -> None:
        """Signal members that were told to stop and have not done so within the grace period."""
        for open_round in self._open.values():
            for name, seconds in open_round.overdue():
                if seconds > TERMINATE_SHARE * self._spec.grace_s:
                    open_round.terminated.add(name)
                    kill = seconds > KILL_SHARE * self._spec.grace_s
                    self._workers.send_signal(signal.SIGKILL if kill else signal.SIGTERM, name)


_CORES: Mapping[str, Callable[[Driver, Options], Core | HopCore]] = {
    PIPELINE: Driver._pipeline_core,
    HOPPER: Driver._hop_core,
    DATA_PARALLEL: Driver._round_core,
    BALANCED: Driver._round_core,
}
"""Scheduling of each phase by its mode."""
_EXECUTORS: Mapping[type, Callable[[Driver, Any], None]] = {
    Start: Driver._start,
    Stop: Driver._stop,
    EndRound: Driver._end_round,
    EndJob: Driver._end_job,
    AskAgain: Driver._poll,
    OpenHops: Driver._open_hops,
    StartVisit: Driver._start_visit,
    **dict.fromkeys(HOP_RECORDS, Driver._tell_hops),
}
