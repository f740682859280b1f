"""The driver of one batch job: executes the decisions of its scheduling on the events of its ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from hetctl.cluster.launchers import LAUNCHERS
from hetctl.model.errors import HetctlError, is_transient
from hetctl.model.events import DRIVER, ExitReason
from hetctl.model.job import SUPERSEDED_EXIT
from hetctl.model.run import RunSpec
from hetctl.model.serialization import encode
from hetctl.model.site import MEMBERS
from hetctl.model.values import dataclass
from hetctl.runtime.data.partition_folder import stage_orders
from hetctl.runtime.driver.job_modes import JobMode, modes_of
from hetctl.runtime.driver.launched_steps import nodes_of_this_job
from hetctl.runtime.driver.rank_group import RankGroup, failed_nodes
from hetctl.runtime.driver.rank_pool import RankPool
from hetctl.runtime.driver.rounds import Rounds
from hetctl.runtime.driver.run_members import RunMembers
from hetctl.runtime.job_logs import disk_error_reason, log_line
from hetctl.runtime.worker.scripts.warm_start import pythons_ahead
from hetctl.scheduling.commands import EndJob, EndRound, ScheduleTick, Start, Stop
from hetctl.scheduling.events import (
    JobEnding,
    JobOpened,
    MemberArrived,
    MembersEdited,
    MemberWithdrawn,
    NodeJoined,
    NodeLost,
    RateSeen,
    TaskEnded,
    TaskSignalled,
    Tick,
)
from hetctl.scheduling.job_scheduler import ALONE, DEADLINE, FINISHED, JobScheduler
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.round_scheduler import POLL_S
from hetctl.storage.event_files import EventQueue
from hetctl.storage.kept_modules import with_kept_modules
from hetctl.storage.lease import Lease
from hetctl.storage.paths import RunFolder
from hetctl.storage.patience import PATIENCE_S, PATIENT
from hetctl.storage.run_files import read_planner_state, read_spec, write_live_metrics
from hetctl.storage.task_fold import TaskReport

if TYPE_CHECKING:
    from hetctl.runtime.driver.trial_queue import TrialQueue

SIGNAL_DELAY_S = 0.5
EDITED = "edited"
"""Reason for which a member leaves its GPUs, to begin again by another stop rule."""
RATES_EVERY_S = 0.5
"""Seconds between two checks of training members' rates, for elastic planners and for fused members."""
REQUESTS_EVERY_S = 1.0
"""Seconds between two looks at users' requests."""
LIVE_METRICS_EVERY_S = 2.0
"""Seconds between two writes of live metrics."""
STATE_EVERY_S, STATE_SHARE = 60.0, 0.01
"""Seconds between two snapshots of the run's state, and the driver's largest share of time for them."""
CALM_S = 10.0
"""Seconds without an error until the disk counts as answering: more than between two launches."""


@dataclass
class DiskTrouble:
    """Period in which the disk does not answer.

    Parameters
    ----------
    since, last : float
        First and last error, in seconds of the monotonic clock.
    is_new : bool
        True if an operation has failed since the last check.
    """

    since: float
    last: float = 0.0
    is_new: bool = True


class Driver:
    """Process that sends a job's events to its scheduling (`JobScheduler`) and executes the commands.

    One driver runs in each allocation. Members that start together form a round. Scheduling times count from
    the start of the run. The driver first waits for the run's lease; SupersededError if it cannot get it.

    Parameters
    ----------
    job : int
        Number of the job in its run.
    deadline : float
        End of all training, in seconds since the epoch.
    batch_id : str
        Job number of the batch system.
    signal_delay_s : float
        Seconds within which the driver gets its signal after the batch system has signalled a step.
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
        spec = PATIENT.call(lambda: read_spec(folder))
        self._lease = Lease(
            *(folder, job, batch_id, spec.site.timeouts.lease_s),
            alone=LAUNCHERS[spec.site.launcher].most_nodes == 1,
            on_lost=_end_at_once,
            say=log_line,
        )
        # Before files of earlier jobs are read or removed: one of these may still train.
        self._lease.acquire(
            lambda: "the job ended" if self._files.stop.exists() or time.time() > deadline else ""
        )
        # Killed jobs leave files that matter only while they run.
        for earlier in range(job):
            PATIENT.call(folder.job(earlier).clear)
        self._spec: RunSpec = PATIENT.call(lambda: with_kept_modules(spec, folder))
        self._job = job
        self._end_reason: str | None = None
        self._batch_id = batch_id
        self._signal_delay_s = signal_delay_s
        nodes = nodes_of_this_job(self._spec.site, self._spec.gpus)
        self._scheduler = JobScheduler()
        self._rank_pool = RankPool(
            *(self._spec.site, nodes, self._files.agents, self._spec.ensemble.preloaded),
            stages=stage_orders(self._spec.ensemble.partitions, [node.name for node in nodes]),
            holds_lease=lambda: self._lease.is_fresh,
            grace_s=self._spec.grace_s,
            pythons=PATIENT.call(pythons_ahead, self._spec.ensemble, self._spec.site.gpus_per_node),
        )
        # On a full disk the driver goes on, to stop its trainers.
        self._queue = EventQueue(folder.events, self._note_disk_error)
        self._trouble: DiskTrouble | None = None
        self._members = RunMembers(
            *(folder, self._spec, self._rank_pool.gpus, self._rank_pool.take_written),
            *(self._open_search(), self._note_disk_error),
        )
        self._began_at = self._members.began_at
        first_round = self._members.next_round
        self._events = self._queue.writer(DRIVER, first_round)
        self._deadline = deadline
        self._opened = JobOpened(
            now_s=self._now_s(),
            nodes=self._rank_pool.nodes,
            deadline_s=deadline - self._began_at,
            first_round=first_round,
            planner_state=PATIENT.call(read_planner_state, folder),
        )
        self._rounds = Rounds(
            *(folder, self._spec, job, deadline, self._opened.max_uninterrupted_s),
            *(self._rank_pool, self._members, self._queue, self._note_disk_error, self._lease.mark),
        )
        self._later = modes_of(self._rounds)
        self._executors: dict[type, Callable[[Any], None]] = {
            Start: self._start,
            Stop: self._stop,
            EndRound: lambda command: self._rounds.end(command.round, command.reason),
            EndJob: self._end_job,
            # The main loop polls often enough.
            ScheduleTick: lambda _: None,
        }
        self._modes: list[JobMode] = []
        self._begin_phase()
        self._next_rates = self._next_requests = 0.0
        self._left = frozenset(self._members.workloads())
        self._next_live_metrics = 0.0
        self._next_state = time.monotonic() + STATE_EVERY_S
        self._ended_by: str | None = None
        self._unclosed: list[RankGroup] = []

    def _open_search(self) -> TrialQueue | None:
        if self._spec.ensemble.search is None:
            return None
        # Imported here, with all search methods, since few runs have a search.
        from hetctl.runtime.driver.trial_queue import TrialQueue

        return PATIENT.call(
            TrialQueue,
            *(self._folder, self._spec, self._rank_pool.gpus),
            lambda name: name in self._scheduler.running,
            *(self._queue, self._note_disk_error, self._rank_pool.note_written),
        )

    def _begin_phase(self) -> None:
        """Begin the job's next phase; until then reports for its mode wait."""
        mode = self._later.pop(0)
        self._executors.update(mode.executors)
        self._scheduler = PATIENT.call(mode.scheduler)
        self._modes.append(mode)

    def run(self) -> str:
        """Run rounds until no work is left or the job has to end; return the reason."""
        self._events.write(
            "job_started",
            job=self._job,
            batch_id=self._batch_id,
            nodes=encode(self._rank_pool.nodes),
            deadline=self._deadline,
        )
        self._send(self._opened)
        while not (reason := self._ended_by):
            self._lease.check()
            self._process_ends()
            self._report_staged()
            self._report_rates()
            self._report_requests()
            self._write_live_metrics()
            self._keep_state()
            self._schedule()
        self._rank_pool.shutdown()
        self._rounds.reap_leaders(at_end=True)
        self._events.write("job_ended", job=self._job, reason=reason)
        with suppress(OSError):
            PATIENT.call(self._queue.flush)
            # Of use only while the job runs; later it would count against a quota of files.
            self._files.live_metrics.unlink(missing_ok=True)
        self._next_state = 0.0
        self._keep_state()
        self._lease.release()
        return reason

    def end(self, reason: str) -> None:
        """Start no more rounds; the first reason stands. Signal handlers may call this at any moment."""
        self._end_reason = self._end_reason or reason

    def _note_disk_error(self, error: OSError) -> None:
        """End the job for a disk error, unless the error is recent and may pass by itself."""
        if is_transient(error):
            if self._trouble is None:
                log_line(f"nothing is started until the disk answers: {error}")
                self._trouble = DiskTrouble(time.monotonic())
            self._trouble.is_new, self._trouble.last = True, time.monotonic()
            if self._trouble.last - self._trouble.since < PATIENCE_S:
                return
        reason = disk_error_reason(error)
        if self._end_reason is None:
            log_line(f"the job ends: {reason} ({error})")
        self.end(reason)

    def _now_s(self) -> float:
        return time.time() - self._began_at

    def _send(self, event: Any) -> None:
        self._execute(self._scheduler.handle(event))

    def _send_all(self, events: Iterable[Iterable[Any]]) -> None:
        for event in chain.from_iterable(events):
            self._send(event)

    def _schedule(self) -> None:
        if self._trouble is not None:
            self._sync_with_disk()
        if self._scheduler.ending or self._has_answered():
            try:
                self._execute(self._scheduler.schedule(self._now_s()))
            except OSError as error:
                self._note_disk_error(error)
        if self._ended_by is None:
            # Messages end the wait: after its task a rank waits 0.5 to 2 ms, with a sleep of 50 ms it waited
            # 25 ms.
            self._rank_pool.wait(POLL_S)

    def _sync_with_disk(self) -> None:
        """Write the waiting events, and read all: the scheduling depends on them."""
        try:
            self._queue.flush()
            self._members.read()
        except OSError as error:
            self._note_disk_error(error)

    def _has_answered(self) -> bool:
        """Return true if no operation has failed since the last call."""
        if self._trouble is None:
            return True
        was_new, self._trouble.is_new = self._trouble.is_new, False
        if time.monotonic() - self._trouble.last > CALM_S:
            log_line("the disk answers again")
            self._trouble = None
        return not was_new

    def _process_ends(self) -> None:
        """Process ended tasks first, then the end of the job: a task may get the signal before the driver."""
        ended = self._rank_pool.reap()
        self._rounds.reap_leaders()
        if any(task.exit_code for task in ended):
            # Ranks fail if another driver has the lease, which must not count against their members.
            self._lease.renew()
        if not self._scheduler.ending and any(task.got_sigterm for task in ended):
            # To end a job, a batch system signals steps and driver in any order.
            time.sleep(self._signal_delay_s)
        self._send(Tick(self._now_s()))
        # Nodes whose agents connect late or again, before these agents' reports. One whose agent returns at
        # once was never lost to the scheduling.
        for node in [node for node in self._rank_pool.nodes if node.name not in self._scheduler.pool.nodes]:
            self._send(NodeJoined(self._now_s(), node))
        self._send_all(mode.reports() for mode in self._modes)
        self._watch_for_the_end()
        for name in (*self._rank_pool.signalled(), *(task.name for task in ended if task.signalled)):
            self._send(TaskSignalled(self._now_s(), name))
        unclosed, self._unclosed = self._unclosed, []
        for task in (*unclosed, *ended):
            self._close_task(task)
        self._report_lost_nodes()
        try:
            self._send_all(mode.arrivals(some_ended=bool(ended)) for mode in self._modes)
        except HetctlError as error:
            self._end_for(error)

    def _end_for(self, error: HetctlError) -> None:
        """End the job in order: one of its files, such as a trial's, cannot be used."""
        log_line(f"the job ends: {error.message} ({error.hint})")
        self.end(error.message)

    def _watch_for_the_end(self) -> None:
        """Report the end of the job, which the job script announces in a file after a signal."""
        try:
            # On a full disk the script leaves an empty file.
            self.end(self._files.stop.read_text(encoding="utf-8").strip() or "signal")
        except FileNotFoundError:
            pass
        except OSError as error:
            self._note_disk_error(error)
        if self._lease.is_claimed and self._end_reason is None:
            log_line("the driver of another job waits for the run: this one ends")
            self.end("signal")
        if self._end_reason and not self._scheduler.ending:
            self._send(JobEnding(self._now_s(), self._end_reason))

    def _report_lost_nodes(self) -> None:
        """Report lost nodes to the scheduling, and record returned ones, after the ends of their tasks."""
        present = {node.name for node in self._rank_pool.nodes}
        for name in [name for name in self._scheduler.pool.nodes if name not in present]:
            self._send(NodeLost(self._now_s(), name))
        returned, self._rank_pool.returned = self._rank_pool.returned, []
        for node in dict.fromkeys(returned):
            self._events.write("node_joined", job=self._job, node=node)

    def _close_task(self, task: RankGroup) -> None:
        """Report the end of a task, and the nodes that failed with it, to the scheduling."""
        running = self._scheduler.running[task.name]
        try:
            report = self._rounds.report_of(task.name, running.round)
        except OSError as error:
            self._note_disk_error(error)
            if not self._end_reason:
                # Its events tell how it ended: the task counts as running until they can be read.
                self._unclosed.append(task)
                return
            report = TaskReport()
        reason = self._rounds.close(task, running, report)
        for mode in self._modes:
            mode.on_task_ended(running, reason.value)
        # By measurement, its next epoch would end after the deadline.
        no_room = task.exit_code == 0 and DEADLINE in report.stop_reasons
        if reason is ExitReason.NODE_FAILURE:
            self._report_failed_nodes(task)
        alone = task.beside_others or ALONE in report.stop_reasons
        self._send(TaskEnded(self._now_s(), task.name, reason, no_room, alone))
        if reason is ExitReason.NODE_FAILURE and (not task.lost_nodes or self._spec.site.launch == MEMBERS):
            # The launcher reports the loss or needs the node: Slurm starts no steps in a job that lost one.
            self._send(JobEnding(self._now_s(), reason.value))

    def _report_failed_nodes(self, task: RankGroup) -> None:
        placed = (place.node for place in task.placement)
        nodes = task.lost_nodes or failed_nodes(task.output, placed)
        self._events.write("node_failed", job=self._job, member=task.name, nodes=list(nodes))
        # A group on several nodes may end after one of its nodes has returned.
        back = (node.name for node in self._rank_pool.nodes if node.name in task.lost_nodes)
        self._rank_pool.returned += back

    def _report_staged(self) -> None:
        staged, self._rank_pool.staged = self._rank_pool.staged, []
        for of_node in staged:
            self._events.write("partitions_staged", job=self._job, **encode(of_node))

    def _report_rates(self) -> None:
        is_elastic = planner_named(self._spec.planner).paradigm == "elastic"
        if not (is_elastic or self._spec.options.get("fuse")) or time.monotonic() < self._next_rates:
            return
        self._next_rates = time.monotonic() + RATES_EVERY_S
        for name, rate in self._members.rates_seen(self._scheduler.running).items():
            self._send(RateSeen(self._now_s(), name, rate))

    def _report_requests(self) -> None:
        """Report members that their users have taken out of training, and those that need it again."""
        if time.monotonic() < self._next_requests:
            return
        self._next_requests = time.monotonic() + REQUESTS_EVERY_S
        before, self._left = self._left, frozenset(self._members.workloads())
        leaving = self._members.withheld(self._scheduler.running)
        if self._members.edits > self._spec.edits:
            try:
                leaving |= self._take_edits()
            except (OSError, HetctlError) as error:
                # Until the next look; the disk may not answer, or not show the file of the edit yet.
                log_line(f"the edited members are not known yet: {error}")
            self._left = frozenset(self._members.workloads())
        for name, reason in leaving.items():
            self._send(MemberWithdrawn(self._now_s(), name, reason))
        for name in self._left - before:
            self._send(MemberArrived(self._now_s(), name))

    def _take_edits(self) -> dict[str, str]:
        """Go on with the members as users have edited them; return those that have to begin anew, and why.

        The job keeps its nodes and its time.
        """
        spec, running = read_spec(self._folder), self._scheduler.running
        if spec.edits < self._members.edits:
            return {}
        was = {member.name: member for member in self._spec.ensemble.members}
        now = {member.name: member for member in spec.ensemble.members}
        # Those that were dropped may still be leaving.
        known = {**now, **{name: member for name, member in was.items() if name not in now}}
        ensemble = replace(self._spec.ensemble, members=tuple(known.values()))
        profiles = {profile.member: profile for profile in (*self._spec.profiles, *spec.profiles)}
        edited = replace(
            self._spec,
            ensemble=ensemble,
            profiles=tuple(profiles.values()),
            retries=spec.retries,
            edits=spec.edits,
        )
        self._members.edit(edited)
        self._spec = self._rounds.spec = edited
        self._send(MembersEdited(self._now_s(), {name: member.stop for name, member in known.items()}))
        # One that has reached a limit that was raised is not done: it begins again then.
        alone = [name for name, task in running.items() if task.task.visit is None]
        return {name: EDITED for name in alone if not known[name].stop.extends(was[name].stop)}

    def _write_live_metrics(self) -> None:
        """Write the state of members in training for `hetctl status`; ignore a full disk."""
        if time.monotonic() < self._next_live_metrics:
            return
        self._next_live_metrics = time.monotonic() + LIVE_METRICS_EVERY_S
        with suppress(OSError):
            write_live_metrics(self._files.live_metrics, self._rank_pool.live_metrics())

    def _keep_state(self) -> None:
        """Save a snapshot; ignore errors, since without it readers are only slower."""
        began = time.monotonic()
        if began < self._next_state:
            return
        with suppress(OSError):
            self._members.keep()
        spent_s = time.monotonic() - began
        self._next_state = began + max(STATE_EVERY_S, spent_s / STATE_SHARE)

    def _execute(self, commands: Sequence[Any]) -> None:
        for command in commands:
            self._executors[type(command)](command)

    def _start(self, command: Start) -> None:
        """Start tasks; report a failed launch as an ended task."""
        started: set[str] = set()
        try:
            started = self._rounds.start(command)
        except OSError as error:
            self._note_disk_error(error)
        for task in command.tasks:
            if task.name not in started:
                self._send(TaskEnded(self._now_s(), task.name, ExitReason.NOT_LAUNCHED))

    def _stop(self, command: Stop) -> None:
        for name, running in self._scheduler.running.items():
            if running.round == command.round and command.member in (None, name):
                busy_s = 0.0 if command.at_once else self._members.busy_s(name)
                self._rank_pool.stop(name, command.reason, busy_s)

    def _end_job(self, command: EndJob) -> None:
        """Begin the job's next phase if one has finished, else end the job."""
        if command.reason != FINISHED or not self._later:
            self._ended_by = command.reason
            return
        opened = self._scheduler.reopened(self._now_s())
        try:
            self._begin_phase()
        except HetctlError as error:
            self._end_for(error)
            self._ended_by = self._end_reason
        else:
            self._send(opened)


def _end_at_once(reason: str) -> None:
    """End the driver at once; its agents see that, and end with their ranks."""
    log_line(f"the driver ends at once: {reason}")
    os._exit(SUPERSEDED_EXIT)
