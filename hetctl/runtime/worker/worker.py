"""The rank on one GPU: runs one task after another as the driver assigns them.

It ends with the driver or with its first failure: a failure may damage the process, so it trains no other
member.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, BinaryIO

from hetctl.model.events import EXIT_CODES, LOST_PEER
from hetctl.model.plan import FUSED
from hetctl.model.serialization import decode, encode
from hetctl.runtime.agent.binding import Binding, hide_gpus
from hetctl.runtime.job_logs import private_log
from hetctl.runtime.stages.measure_links import measure_links
from hetctl.runtime.stages.pipeline_trainer import train_stage
from hetctl.runtime.transport import Connection
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.fused import train_fused
from hetctl.runtime.worker.group import LostPeerError
from hetctl.runtime.worker.hardware import reset_peak_memory
from hetctl.runtime.worker.measuring.measure import measure, measure_command
from hetctl.runtime.worker.measuring.measure_layers import measure_layers
from hetctl.runtime.worker.measuring.probe_tasks import report_node, time_all_reduce
from hetctl.runtime.worker.messages import (
    ALL_REDUCE,
    MEASURE,
    MEASURE_COMMAND,
    MEASURE_LAYERS,
    MEASURE_LINKS,
    PROBE,
    RUN_COMMAND,
    STAGE,
    TRAIN,
    VISIT,
    Assignment,
)
from hetctl.runtime.worker.reporting import failure_reason, report_failure
from hetctl.runtime.worker.scripts.command_training import run_command
from hetctl.runtime.worker.training import train
from hetctl.runtime.worker.visiting import visit
from hetctl.scheduling.job_scheduler import SIGNAL
from hetctl.storage.processes import name_process

DEVICE_VARIABLE = "HETCTL_DEVICE"
"""Variable, for the user's functions, with the number of the rank's GPU or slot on the node."""
PROCESS_NAME = "hetctl-rank-{}"
ORPHANED = 76
"""Exit code of a rank whose driver has ended."""

WORK: dict[str, Callable[[Assignment, WorkerContext], None]] = {
    TRAIN: train,
    FUSED: train_fused,
    VISIT: visit,
    STAGE: train_stage,
    RUN_COMMAND: run_command,
    MEASURE: measure,
    MEASURE_COMMAND: measure_command,
    MEASURE_LAYERS: measure_layers,
    MEASURE_LINKS: measure_links,
    PROBE: report_node,
    ALL_REDUCE: time_all_reduce,
}
STOPPED_BY_SIGTERM = frozenset({TRAIN, FUSED, VISIT, STAGE, RUN_COMMAND})
"""Tasks that SIGTERM stops without ending the rank: a visit leaves no trace, others a checkpoint."""


def serve(binding: Binding, channel: socket.socket) -> int:
    """Run tasks until the driver releases the rank; return 0 if nothing has failed."""
    name_process(PROCESS_NAME.format(binding.gpu))
    # The template ignores SIGTERM, and a fork inherits that.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Before any library starts threads, which inherit it: later changes reach one
    # thread only (sched_setaffinity(2)).
    os.sched_setaffinity(0, binding.cores)
    os.environ[DEVICE_VARIABLE] = str(binding.gpu)
    if binding.device is None:
        # A slot is a share of the cores. Otherwise all ranks would take the first GPU, which NCCL refuses.
        hide_gpus()
    if binding.mig_device:
        os.environ["CUDA_VISIBLE_DEVICES"] = binding.mig_device
    connection = Connection(channel)
    stops = Stops(lambda: connection.send({"signalled": True}))
    inbox = Inbox(connection, stops)
    with ExitStack() as keep:
        context = WorkerContext(
            binding,
            keep,
            send=lambda **message: connection.send(encode(message)),
            stop_reason=stops.reason,
            joined=stops.joined,
            on_unsaved=inbox.end,
            arrived=inbox.arrived,
        )
        stops.end_idle(lambda: context.kept is not None and context.kept.saver.is_busy, inbox.end)
        connection.send({"ready": True})
        for assignment in inbox.assignments():
            stopped = assignment.task.kind in STOPPED_BY_SIGTERM
            key = assignment.rank_info.key
            with inbox.at_work, stops.stopping_at_sigterm(key) if stopped else nullcontext():
                code = work(assignment, context)
            if code:
                return code
            # A driver that has ended gives no more assignments, but states may be unsaved.
            with suppress(ConnectionError):
                # Of fused members, each has reported its own end.
                if assignment.task.kind != FUSED:
                    connection.send({"done": True})
            # While the driver plans the next round: releasing a member takes TensorFlow 10 to 13 ms of CPU
            # time.
            context.clear()
        # Visits may have left states that are not in checkpoints yet.
        failure = context.kept.saver.finish() if context.kept else None
        return report_failure(*failure) if failure else 0


class Inbox:
    """Messages that arrive over the connection; a rank at work ends when its driver has ended.

    Parameters
    ----------
    stops : Stops
        Record of the driver's stop messages.

    Attributes
    ----------
    at_work : Lock
        Lock that the rank holds while it works: if the driver ends then, the rank ends at once.
    """

    def __init__(self, connection: Connection, stops: Stops) -> None:
        self._connection = connection
        self._stops = stops
        # Unlike Queue, SimpleQueue is reentrant, so a signal handler may use it.
        self._queue: queue.SimpleQueue[Assignment | None] = queue.SimpleQueue()
        self.at_work = threading.Lock()
        threading.Thread(target=self._listen, name="inbox", daemon=True).start()

    def assignments(self) -> Iterator[Assignment]:
        """Return the assignments until the driver ends or releases the rank, or `end` is called."""
        return iter(self._queue.get, None)

    def arrived(self) -> Assignment | None:
        """Return the next assignment if a fused member's has arrived; None: `assignments` has the rest."""
        with suppress(queue.Empty):
            assignment = self._queue.get_nowait()
            if assignment is not None and assignment.task.kind == FUSED:
                return assignment
            # It comes after all members here have ended.
            self._queue.put(assignment)
        return None

    def end(self) -> None:
        """End `assignments` after all that have arrived."""
        self._queue.put(None)

    def _listen(self) -> None:
        try:
            while True:
                message = self._connection.receive()
                if "stop" in message:
                    # The first reason stands.
                    self._stops.reasons.setdefault(message["stop"], message["reason"])
                elif "joined" in message:
                    self._stops.joined.add(message["joined"])
                elif "shutdown" in message:
                    self.end()
                else:
                    self._queue.put(decode(Assignment, message["task"]))
        except ConnectionError:
            if not self.at_work.acquire(blocking=False):
                # sys.exit() would end this thread alone, and the main thread may be stuck in native code.
                os._exit(ORPHANED)
            self.end()


class Stops:
    """Messages of the driver about groups: reasons to stop with a checkpoint, and who is alone no more.

    Parameters
    ----------
    report : callable
        Function that tells the driver of a signal to this rank, so that it stops the other ranks.

    Attributes
    ----------
    reasons : dict of str to str
        Reasons by the group's key, as in `RankInfo`: a message may arrive when another task has begun.
    joined : set of str
        Keys of groups to whose GPU another one has come since they began.
    """

    def __init__(self, report: Callable[[], None]) -> None:
        self.reasons: dict[str, str] = {}
        self.joined: set[str] = set()
        self._report = report
        self._to_report = False
        self._when_idle: Any = signal.SIG_DFL

    def end_idle(self, is_needed: Callable[[], bool], end: Callable[[], None]) -> None:
        """Make SIGTERM end an idle rank by `end`, or at once if `is_needed` returns false."""
        rank_pid = os.getpid()

        def on_sigterm(number: int, _frame: Any) -> None:
            if os.getpid() == rank_pid and is_needed():
                end()
            else:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

        self._when_idle = on_sigterm
        signal.signal(signal.SIGTERM, on_sigterm)

    def reason(self, key: str) -> str | None:
        """Return why a group has to stop, or None; called between steps."""
        if self._to_report:
            # Not sent by the signal handler, which may have interrupted another message.
            self._to_report = False
            self._report()
        return self.reasons.get(key)

    @contextmanager
    def stopping_at_sigterm(self, key: str) -> Iterator[None]:
        """Make SIGTERM stop the group at work; a second SIGTERM ends the rank.

        Processes forked by the user's functions inherit the handler; SIGTERM ends them, too.
        """
        rank_pid, received = os.getpid(), False

        def on_sigterm(number: int, _frame: Any) -> None:
            nonlocal received
            if received or os.getpid() != rank_pid:
                # The parent is to see a death by SIGTERM, not an exit code of Python.
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            received = self._to_report = True
            self.reasons.setdefault(key, SIGNAL)

        signal.signal(signal.SIGTERM, on_sigterm)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, self._when_idle)
            self._to_report = False


def work(assignment: Assignment, context: WorkerContext) -> int:
    """Run one task with its output in its log; return an exit code, or 0 to continue."""
    context.lease = assignment.task.training.lease if assignment.task.training else None
    try:
        log = context.patience.call(lambda: private_log(assignment.task.log))
    except OSError as error:
        return EXIT_CODES[failure_reason(error)]
    with output_to(log):
        # The peak of members that the process trained before must not count.
        reset_peak_memory()
        try:
            WORK[assignment.task.kind](assignment, context)
        except Exception as error:
            if isinstance(error, LostPeerError) or context.group.peer_failed():
                print(
                    f"rank {assignment.rank_info.rank} ends after the loss of another rank: {error}",
                    file=sys.stderr,
                )
                return LOST_PEER
            return report_failure(error, context.writer(assignment.task))
        finally:
            # Here, since the driver may kill the rank as soon as it knows that the last task is done.
            context.remove_temporary_files()
    return 0


@contextmanager
def output_to(log: BinaryIO) -> Iterator[None]:
    """Redirect standard output and errors of all threads and libraries to a log, and close it."""
    before = os.dup(1), os.dup(2)
    try:
        with log:
            _point_to(log.fileno(), log.fileno())
        yield
    finally:
        _point_to(*before)
        for descriptor in before:
            os.close(descriptor)


def _point_to(output: int, errors: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        # A full disk for logs does not fail the task.
        with suppress(OSError):
            stream.flush()
    os.dup2(output, 1)
    os.dup2(errors, 2)
