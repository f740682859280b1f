"""Rounds of a job: their events, their tasks' groups, and their leaders on several nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

from hetctl.cluster.launchers import LAUNCHERS
from hetctl.cluster.launchers.container import node_command
from hetctl.model.ensemble import Member
from hetctl.model.errors import is_transient
from hetctl.model.events import DRIVER, EXIT_CODES, MEMBER_FAULTS, ExitReason
from hetctl.model.plan import FUSED, Allocation
from hetctl.model.run import LOCKSTEP, RunSpec
from hetctl.model.serialization import encode
from hetctl.model.training_settings import OFF
from hetctl.model.values import dataclass
from hetctl.perf.rate_extrapolation import rate_on
from hetctl.runtime.data.round_inputs import InputShare, RoundInputs, append_round, nodes_of
from hetctl.runtime.data.sharing.node_folder import run_key
from hetctl.runtime.driver.launched_steps import StepPool
from hetctl.runtime.driver.rank_group import DESCRIPTIONS, RankGroup, exit_reason_of, with_peak
from hetctl.runtime.driver.rank_pool import RankPool
from hetctl.runtime.driver.run_members import NO_ROOM, RunMembers
from hetctl.runtime.job_logs import length_of, log_line
from hetctl.runtime.worker.messages import (
    RUN_COMMAND,
    STAGE,
    TRAIN,
    VISIT,
    TaskMessage,
    TrainingSpec,
)
from hetctl.scheduling.commands import Start, Task
from hetctl.scheduling.job_scheduler import RunningTask
from hetctl.scheduling.planners.base import options_from
from hetctl.storage.event_files import EventQueue
from hetctl.storage.event_log import EventFile, end_of_file
from hetctl.storage.lease import LeaseMark
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_files import checkpoint_folder, write_planner_state
from hetctl.storage.task_fold import TaskReport, report_of

SHUTDOWN_S = 5.0
"""Seconds in which leaders have to end at the end of the job, after all trainers."""


@dataclass
class Rounds:
    """The rounds of one job.

    Parameters
    ----------
    deadline, max_uninterrupted_s
        Same as in `TrainingSpec`.
    queue : EventQueue
        Events of the driver.
    on_failure : callable
        Function called with the error if something cannot be written or launched.
    """

    folder: RunFolder
    spec: RunSpec
    job: int
    deadline: float
    max_uninterrupted_s: float
    rank_pool: RankPool
    members: RunMembers
    queue: EventQueue
    on_failure: Callable[[OSError], None]
    lease: LeaseMark
    _open: set[int] = field(default_factory=set)
    _event_files: dict[str, EventFile] = field(default_factory=dict)
    _leader_steps: StepPool = field(default_factory=StepPool)
    """Steps of leaders, one for each round, which end with the round's trainers."""

    def open(self, index: int, names: Sequence[str], predicted_s: float = 0.0) -> None:
        """Record the start of a round."""
        fields = {"job": self.job, "predicted_s": predicted_s, "members": list(names)}
        self.queue.writer(DRIVER, index).write("round_started", **fields)
        self._open.add(index)

    def start(self, command: Start) -> set[str]:
        """Start tasks, in a new round unless theirs is open; return the launched ones.

        Raises
        ------
        OSError
            If the start of the round cannot be written; then no member starts.
        """
        members = self.members.with_batch_sizes(task.name for task in command.tasks)
        guessed = self.members.guessed(task.allocation for task in command.tasks)
        tasks = [
            replace(task, allocation=replace(task.allocation, rate_known=task.name not in guessed))
            for task in command.tasks
        ]
        shares: Mapping[str, tuple[InputShare, ...]]
        if command.round in self._open:
            shares = {member.name: (InputShare(),) for member in members}
        else:
            self._begin(command)
            allocations = [task.allocation for task in tasks]
            several = self.spec.sharing == LOCKSTEP and len(nodes_of(allocations)) > 1
            inputs = RoundInputs(
                run=self.spec.run,
                run_key=run_key(self.spec.run, self.spec.checkpoints),
                index=command.round,
                ensemble=replace(self.spec.ensemble, members=members),
                allocations=tuple(allocations),
                sharing=self.spec.sharing,
                preprocess=self.members.preprocess,
                cores=self.spec.site.cores_per_node,
                has_leaders=several and LAUNCHERS[self.spec.site.launcher].leaders is not None,
                timeouts=self.spec.site.timeouts,
            )
            try:
                self._start_leaders(inputs)
            except OSError as error:
                self.on_failure(error)
            shares = inputs.shares
        launched = (
            self._launch(command.round, task, member, shares[member.name])
            for task, member in zip(tasks, members, strict=True)
        )
        return {name for name in launched if name}

    def _begin(self, command: Start) -> None:
        write_planner_state(self.folder, command.planner_state)
        self.open(command.round, [task.name for task in command.tasks], command.predicted_s)
        if error := self.queue.error:
            if is_transient(error):
                # Its start will still be written.
                self.end(command.round, "failed")
            self._open.discard(command.round)
            raise error

    def report_of(self, name: str, index: int) -> TaskReport:
        """Return the report of a member's trainer; OSError if its events cannot be read."""
        # A trainer that briefly outlives its driver may write events of an earlier round.
        return report_of(e for e in self._event_files[name].read_new() if e.round == index)

    def close(self, group: RankGroup, running: RunningTask, report: TaskReport) -> ExitReason:
        """Record the end of a task; return its reason."""
        reason = reason_of_end(group, running, report)
        description, gpu_type = group.description(reason), self._gpu_type_of(running.task.allocation)
        unfit_gpus = self.members.unfit_gpus(running.task.allocation, gpu_type or "", reason)
        if reason is ExitReason.GPU_BUSY and unfit_gpus == 0:
            log_line(f"no member shares a GPU from now on: {group.name} found one that takes one process")
            self.members.keep_apart()
        if reason is ExitReason.OUT_OF_MEMORY and not group.overuse:
            # The known peak counts for a trainer that reported none.
            peak = report.peak_memory_bytes or self.members.peak_memory(group.name)
            description = with_peak(description, peak)
        lacked = gpu_type if reason in NO_ROOM or unfit_gpus is not None else None
        found = (group.exit_code, reason, description, unfit_gpus, group.energy_j, lacked)
        self._write_end(running.round, group.name, *found, group.divided_s)
        return reason

    def end(self, index: int, reason: str) -> None:
        """Record the end of a round, if it is open."""
        if index in self._open:
            self._open.remove(index)
            self.queue.writer(DRIVER, index).write("round_ended", ended_by=reason)

    def _write_end(
        self,
        index: int,
        name: str,
        exit_code: int,
        reason: ExitReason,
        description: str,
        unfit_gpus: int | None = None,
        energy_j: float | None = None,
        gpu_type: str | None = None,
        gpu_seconds: float | None = None,
    ) -> None:
        self.queue.writer(DRIVER, index).write(
            "task_ended",
            member=name,
            exit_code=exit_code,
            reason=reason.value,
            description=description,
            fault=reason in MEMBER_FAULTS and unfit_gpus is None,
            unfit_gpus=unfit_gpus,
            **({} if energy_j is None else {"energy_j": round(energy_j, 1)}),
            **({} if gpu_seconds is None else {"gpu_seconds": round(gpu_seconds, 1)}),
            gpu_type=gpu_type,
        )

    def _start_leaders(self, inputs: RoundInputs) -> None:
        """Start the leaders of a round, if it needs any; OSError if they cannot be started.

        In lockstep on several nodes, leaders exchange data between the nodes. If they fail, the trainers
        continue without them, and no member counts as failed.
        """
        site, files = self.spec.site.with_overrides(os.environ), self.folder.job(self.job)
        start = LAUNCHERS[site.launcher].leaders
        if not inputs.has_leaders or start is None:
            return
        append_round(files.round_inputs, inputs)
        arguments = (str(files.round_inputs), "--round", str(inputs.index))
        words = ("-m", "hetctl.runtime.data.node_exchange", *arguments)
        command = node_command(site, files.path, sys.executable, *words)
        step = start(site, f"exchange of round {inputs.index}", nodes_of(inputs.allocations), command)
        self._leader_steps.launch(step, files.exchange_log)

    def reap_leaders(self, *, at_end: bool = False) -> None:
        """Log the leaders that have failed since the last call; at the end, end those that are left."""
        ended = self._leader_steps.end(SHUTDOWN_S) if at_end else self._leader_steps.reap()
        for name, exit_code in ended.items():
            if exit_code:
                log_line(f"the {name} ended with {exit_code}: its trainers continue without it")

    def _launch(self, index: int, task: Task, member: Member, shares: tuple[InputShare, ...]) -> str | None:
        """Launch a task; None if that fails."""
        allocation, visit = task.allocation, task.visit
        # Before the group forms: the use of its GPUs counts from this event on, even if the driver is killed.
        self.queue.writer(DRIVER, index).write(
            "task_started",
            member=member.name,
            gpus=allocation.gpus,
            mode=allocation.mode,
            rate=allocation.rate,
            rate_known=allocation.rate_known,
            placement=encode(allocation.placement),
            batch_size=member.batch_size,
            log_start=length_of(self.folder.log_of(member.name)),
            **({"pipeline": encode(allocation.pipeline)} if allocation.pipeline else {}),
        )
        training = replace(self._training(index, allocation, member, shares), visit=visit)
        own = RUN_COMMAND if member.command else FUSED if allocation.mode == FUSED else TRAIN
        kind = VISIT if visit else STAGE if allocation.pipeline else own
        message = TaskMessage(kind, str(self.folder.path), member.name, training)
        try:
            # Before the ranks start: all later events in the file are of this round.
            self._event_files[member.name] = end_of_file(self.folder.events_of(member.name), member.name)
            alone = allocation.alone or allocation.own_gpus > 0
            self.rank_pool.start(message, allocation.placement, training.ensemble.code, alone=alone)
        except OSError as error:
            self.on_failure(error)
            reason = ExitReason.NOT_LAUNCHED
            exit_code = EXIT_CODES[ExitReason.PROGRAM_ERROR]
            self._write_end(index, member.name, exit_code, reason, DESCRIPTIONS[reason])
            return None
        return member.name

    def _training(
        self, index: int, allocation: Allocation, member: Member, shares: tuple[InputShare, ...]
    ) -> TrainingSpec:
        site = self.spec.site
        balance = replace(self.spec.ensemble.balance, mode=options_from(self.spec.options).balance)
        if balance.mode != OFF and allocation.pipeline is None:
            allocation = replace(allocation, batch_sizes=self._first_batches(allocation, member))
        gpu_type = self._gpu_type_of(allocation)
        known = self.members.fused_rates(member.name, gpu_type or "") if allocation.mode == FUSED else {}
        # A node's ranks share resources by this key; members with code of their own differ.
        key = run_key(self.spec.run, self.spec.checkpoints)
        return TrainingSpec(
            run=self.spec.run,
            run_key=f"{key}-{member.code.digest}" if member.code else key,
            round=index,
            ensemble=self.spec.ensemble.of(member),
            allocation=allocation,
            checkpoints=str(checkpoint_folder(self.spec, member.name)),
            deadline=self.deadline,
            shares=shares,
            max_uninterrupted_s=self.max_uninterrupted_s,
            sharing=self.spec.sharing,
            preprocessors=site.cores_per_node // site.gpus_per_node,
            gpu_type=gpu_type,
            balance=balance,
            network=site.network,
            timeouts=site.timeouts,
            grace_s=self.spec.grace_s,
            lease=self.lease,
            fused_rates=known,
        )

    def _first_batches(self, allocation: Allocation, member: Member) -> tuple[int, ...]:
        """Return a batch for each GPU by its type's profiled rates; empty if each has the member's own."""
        profile = next((p for p in self.spec.profiles if p.member == member.name), None)
        types = {node.name: node.gpu_type or "" for node in self.rank_pool.nodes}
        if profile is None or len({types[place.node] for place in allocation.placement}) == 1:
            return ()
        # Imported here, since batches differ only between types of GPU.
        from hetctl.methods.balance.managers import first_batches

        found = {t: rate_on(allocation.gpus, profile.rates_by_type.get(t, {})) for t in types.values()}
        # For a type without a measurement; the manager will find its speed.
        slowest = min((rate for rate in found.values() if rate), default=1.0)
        return first_batches(
            allocation, member.step_samples(allocation.gpus), types, lambda t: found[t] or slowest
        )

    def _gpu_type_of(self, allocation: Allocation) -> str | None:
        """Return the one type of a member's GPUs; None if they are of several."""
        types = {node.name: node.gpu_type for node in self.rank_pool.nodes}
        held = {types.get(place.node) for place in allocation.placement}
        return next(iter(held)) or None if len(held) == 1 else None


def reason_of_end(group: RankGroup, running: RunningTask, report: TaskReport) -> ExitReason:
    """Return why a task ended; a member that is stopping may also be killed."""
    if group.beside_others:
        # The one at fault will fail alone.
        return report.exit_reason or ExitReason.STOPPED
    if group.hung:
        return ExitReason.HUNG
    # The driver itself sent the signal, so the exit code is no failure of the member.
    if group.terminated:
        return ExitReason.STOPPED
    # The ranks of a visit report to the driver, and write no events.
    if group.exit_code == 0 and (report.exit_reason or running.task.visit):
        return report.exit_reason or ExitReason.STOPPED
    # srun and ranks may exit with 0 after the loss of a node: a clean exit counts only with the trainer's
    # last event.
    reason = exit_reason_of(group.exit_code, group.output, report.failed_by)
    if reason is not ExitReason.KILLED:
        return reason
    # By the trainer's last event its state is in a checkpoint: it was killed at its very end.
    if report.exit_reason:
        return report.exit_reason
    if group.lost_nodes:
        return ExitReason.NODE_FAILURE
    return ExitReason.STOPPED if running.stopping else reason
