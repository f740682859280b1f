"""Training of a member that is a command: each rank of its group runs it as its child."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.model.serialization import decode, encode
from hetctl.model.training_progress import EpochResult
from hetctl.runtime.transport import LOCALHOST
from hetctl.runtime.worker.command_environment import Meeting, RankDevice, rank_variables, visible_devices
from hetctl.runtime.worker.command_process import CommandProcess
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import Group, LostPeerError, NoCollectives, ProcessGroup, all_gather
from hetctl.runtime.worker.member_trainer import Reporter, StopSignal, check_metrics
from hetctl.runtime.worker.messages import Assignment, TrainingSpec
from hetctl.runtime.worker.reporting import OUT_OF_MEMORY_ERRORS, reporter
from hetctl.runtime.worker.script_reports import ScriptReport, WrongReportError, parse_report, shown
from hetctl.runtime.worker.tensorboard import Board
from hetctl.runtime.worker.training import stop_signal_of
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.event_files import read_events
from hetctl.storage.paths import board_in

LOOK_S = 0.05
SIGNAL_DELAY_S = 1.0
"""Seconds in which a rank gets the SIGTERM of a batch system that has ended its command already."""
ENDED, FAILED, OVER, STOP = "ended", "failed", "over", "stop"
"""Messages between ranks: the command has ended well, or not; all are to end, or to stop. With a reason."""


def run_command(assignment: Assignment, context: WorkerContext) -> None:
    """Run a member's command until it ends, or is told to stop."""
    spec, place = assignment.task.training, assignment.place
    assert spec is not None
    (member,) = spec.ensemble.members
    group = context.join(place, spec.network, spec.timeouts, NoCollectives())
    events = reporter(assignment.task, group, context.send_written)
    history = _history(assignment) if group.rank == 0 else {}
    done = group.broadcast(len(history))
    make_private_folder(Path(spec.checkpoints))
    environment = _environment(spec, member, group, context, done)
    events.write("started", epochs=max(history, default=0), part_samples=0)
    reports = EpochReports(spec, member, events, history)
    if reason := group.broadcast(reports.reason_to_stop()):
        group.leave()
        events.write("converged", reason=reason)
        return
    words, folder = member.command_line, Path(spec.ensemble.folder)
    with closing(CommandProcess(words, folder, environment, spec.grace_s)) as process:
        stop = stop_signal_of(context, spec, assignment)
        run = CommandRun(group, process, stop, reports, context)
        run.watch()
    group.leave()
    run.report_end(events)


def _history(assignment: Assignment) -> dict[int, EpochResult]:
    """Return the epochs that the member has reported in this run, by number."""
    path = assignment.task.events / f"{assignment.task.name}.jsonl"
    found = [decode(EpochResult, event.data) for event in read_events(path) if event.kind == "epoch"]
    return {epoch.epoch: epoch for epoch in reversed(found)}


def _environment(
    spec: TrainingSpec, member: Member, group: Group, context: WorkerContext, done: int
) -> dict[str, str]:
    binding = context.binding
    own_place = encode(RankDevice(binding.node, binding.device))
    devices = [decode(RankDevice, place) for place in all_gather(group, own_place)]
    port = group.broadcast(_free_port() if group.rank == 0 else None)
    wired = group if isinstance(group, ProcessGroup) else None
    meeting = Meeting(wired.host, port, wired.interface) if wired else Meeting(LOCALHOST, port, None)
    own = {
        "HETCTL_RUN": spec.run,
        "HETCTL_ROUND": str(spec.round),
        "HETCTL_MEMBER": member.name,
        "HETCTL_SEED": str(member.seed),
        "HETCTL_BATCH_SIZE": str(member.batch_size),
        "HETCTL_EPOCH": str(done),
        "HETCTL_CHECKPOINT_DIR": spec.checkpoints,
        "HETCTL_DEADLINE": str(spec.deadline),
    }
    return {
        **os.environ,
        **visible_devices(group.rank, devices, os.environ),
        **rank_variables(group.rank, devices, meeting),
        **member.environment,
        **own,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@dataclass
class EpochReports:
    """The epochs that a member's command reports, as events; on rank 0 alone.

    Parameters
    ----------
    history : dict of int to EpochResult
        Epochs of the run by number.
    """

    spec: TrainingSpec
    member: Member
    events: Reporter
    history: dict[int, EpochResult]

    def __post_init__(self) -> None:
        self._board: Board | None = None
        self._reported_at: float | None = None
        self._began_at = time.time()
        self._wrong = 0

    def reason_to_stop(self) -> str | None:
        """Return why the member has converged by its stop rule; None if it has not."""
        epochs = (self.history[number] for number in sorted(self.history))
        return self.member.stop.reason_to_stop(tuple(e.metrics[self.member.stop.metric] for e in epochs))

    def take(self, line: bytes) -> None:
        """Write the event of an epoch; of wrong lines only the first has an event.

        Raises
        ------
        BadInputError
            If the metric of the stop rule is missing, or one is not finite.
        """
        try:
            report = parse_report(line)
        except WrongReportError as error:
            self._ignore(line, str(error))
            return
        check_metrics(report.metrics, self.member.stop.metric)
        result = self._result(report, time.time())
        # A command that was killed before its checkpoint was written trains the epoch again.
        if report.epoch in self.history:
            return
        self.history[report.epoch] = result
        self.events.write("epoch", **encode(result), evaluate_s=0.0)
        path = board_in(Path(self.spec.checkpoints))
        self._board = self._board or Board(path, int(report.samples or 0))
        self._board.show(result)

    def _result(self, report: ScriptReport, now: float) -> EpochResult:
        # The time until the first report has the start of the command in it.
        known = report.seconds or (now - self._reported_at if self._reported_at else None)
        seconds = known or now - self._began_at
        self._reported_at = now
        return EpochResult(
            epoch=report.epoch,
            metrics=report.metrics,
            seconds=seconds,
            gpus=self.spec.allocation.gpus,
            finished_at=now,
            rate=report.samples / known if report.samples and known else None,
            batch_size=self.member.batch_size,
            gpu_type=self.spec.gpu_type,
        )

    def _ignore(self, line: bytes, rule: str) -> None:
        self._wrong += 1
        if self._wrong == 1:
            print(f"a report of the command is ignored: {rule}: {shown(line)}", flush=True)
            self.events.write("report_ignored", line=shown(line), rule=rule)


@dataclass
class CommandRun:
    """A command in training, on one rank of its group.

    Parameters
    ----------
    ended : set of int
        Ranks whose commands have ended; of rank 0 alone.
    """

    group: Group
    process: CommandProcess
    stop: StopSignal
    reports: EpochReports
    context: WorkerContext
    ended: set[int] = field(default_factory=set)
    converged: str | None = None
    _heard: dict[str, str] = field(default_factory=dict)
    _asked: bool = False

    def watch(self) -> None:
        """Follow the command until all ranks' have ended.

        Raises
        ------
        BadInputError
            If this rank's has failed.
        LostPeerError
            If another rank's has.
        """
        while not self._is_over():
            self._take_reports(LOOK_S)
            self._exchange()
            self.context.sign()
            self._stop_if_told()
            self.process.press()
            code = self.process.ended()
            if code is not None and self.group.rank not in self.ended:
                self._end(code)
        if self.group.rank == 0:
            self.group.broadcast([OVER, ""])

    def report_end(self, events: Reporter) -> None:
        """Write the last event of the member in this round."""
        if self.converged:
            events.write("converged", reason=self.converged)
        elif self.process.stopping:
            reason = self.stop.reason or self._heard.get(STOP)
            events.write("stopped", reason=reason, part_samples=0)
        else:
            events.write("converged", reason="its command has ended with exit code 0")

    def _is_over(self) -> bool:
        if self.group.rank == 0:
            return len(self.ended) == self.group.size
        return OVER in self._heard

    def _take_reports(self, wait_s: float) -> None:
        for line in self.process.reports(wait_s):
            if self.group.rank == 0:
                self.reports.take(line)
                self.converged = self.converged or self.reports.reason_to_stop()

    def _exchange(self) -> None:
        for rank, (kind, reason) in self.group.reports():
            if kind == FAILED:
                raise LostPeerError("the command of another rank has failed")
            if kind == ENDED:
                self.ended.add(rank)
            self._heard.setdefault(kind, reason)

    def _stop_if_told(self) -> None:
        """Stop the command once rank 0 says so, which stops its own first.

        Otherwise the command of another rank, told earlier, could leave that of rank 0, which would end
        without having been told to.
        """
        if self.process.stopping:
            return
        leads, told = self.group.rank == 0, STOP in self._heard
        if told or (leads and self.converged) or self.stop():
            if leads or told:
                self.process.stop()
            self._ask()

    def _ask(self) -> None:
        """Tell the other ranks, through rank 0, to stop."""
        if not self._asked:
            self._asked = True
            self._tell(STOP, self.stop.reason or "")

    def _tell(self, kind: str, reason: str = "") -> None:
        """Send rank 0 a message, or all others one of rank 0."""
        if self.group.rank == 0:
            self.group.broadcast([kind, reason])
        else:
            self.group.report([kind, reason])

    def _end(self, code: int) -> None:
        """Note the end of this rank's command; its last reports may still be in the pipe."""
        self._take_reports(0.0)
        if code == -signal.SIGTERM and not self.process.stopping:
            self._await_own_signal()
        if code and not self.process.stopping:
            self._exchange()
            self._tell(FAILED)
            raise _failure(code, self.process.last_errors())
        if self.process.stopping:
            print(f"the command has ended after it was told to stop ({_described(code)})", flush=True)
        self.ended.add(self.group.rank)
        if self.group.rank != 0:
            self._tell(ENDED)

    def _await_own_signal(self) -> None:
        limit = time.monotonic() + SIGNAL_DELAY_S
        while not self.stop() and time.monotonic() < limit:
            time.sleep(LOOK_S)
        if self.stop():
            self.process.stop()
            self._ask()


def _failure(code: int, errors: str) -> BadInputError:
    error = BadInputError(f"the command has ended with {_described(code)}{f': {errors}' if errors else ''}")
    if any(name in errors for name in OUT_OF_MEMORY_ERRORS):
        # So that it counts as out of memory, and the batch may become smaller.
        error.__cause__ = MemoryError()
    return error


def _described(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
