"""Training of a member that is a command: each rank of its group runs it as a child."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from hetctl.model.searches import PART
from hetctl.model.serialization import encode
from hetctl.model.training_progress import NO_BEST, BestCheckpoint, EpochResult
from hetctl.model.values import dataclass
from hetctl.perf.step_times import (
    WANTED_IN_TRAINING,
    Mark,
    add_mark,
    epoch_pace,
    is_new_run,
    known_times,
)
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import CollectiveBackend
from hetctl.runtime.worker.hardware import Busy, busy_share, live_metrics_to, memory_of_commands
from hetctl.runtime.worker.member_trainer import Note, check_metrics, timed_rate
from hetctl.runtime.worker.messages import Assignment, TaskMessage, TrainingSpec
from hetctl.runtime.worker.scripts.best_copies import PREDICTIONS, BestCopies, ChangedMeanwhileError
from hetctl.runtime.worker.scripts.command_process import (
    ScriptReport,
    WrongReportError,
    parse_report,
    printable,
)
from hetctl.runtime.worker.scripts.command_run import CommandRun, own_variables, start_command
from hetctl.runtime.worker.tensorboard import TensorBoardWriter
from hetctl.runtime.worker.training import make_stop_signal
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.event_files import EventWriter, read_events
from hetctl.storage.paths import tensorboard_file
from hetctl.storage.patience import PATIENT

NAMED = "checkpoint_named"
"""Kind of event for a checkpoint that the command has named."""


def run_command(assignment: Assignment, context: WorkerContext) -> None:
    """Run a member's command until it ends, or is told to stop."""
    spec, rank_info = assignment.task.spec, assignment.rank_info
    (member,) = spec.ensemble.members
    group = context.join(rank_info, spec.network, spec.timeouts, CollectiveBackend())
    patience = context.patience
    events = context.reporter(assignment.task)
    history, checkpoint = dict[int, EpochResult](), None
    if group.rank == 0:
        history, named = patience.call(reported, assignment.task)
        found = patience.call(newest_checkpoint, Path(spec.checkpoints), member.resume.checkpoint)
        checkpoint = named or found
    done, resume_from = group.broadcast([len(history), checkpoint])
    patience.call(make_private_folder, Path(spec.checkpoints))
    own = own_variables(member, spec.run, spec.round, done, spec.checkpoints, spec.deadline, resume_from)
    samples = spec.ensemble.samples_per_epoch
    events.write("started", epochs=max(history, default=0), part_samples=0, samples=samples)
    reports = EpochReports(spec, events, history, heartbeat=context.heartbeat)
    reports.report_best()
    if reason := group.broadcast(reports.reason_to_stop()):
        group.barrier_and_close()
        events.write("converged", reason=reason)
        return
    words, folder = member.command_line(spec.checkpoints, resume_from), Path(spec.ensemble.folder)
    with ExitStack() as stack:
        process = start_command(group, context, member, words, folder, own, spec.grace_s, stack)
        if group.rank == 0:
            reports.starts_at = lambda: (assignment.launched_at, process.began_at)
            busy = busy_share(context.binding.device, process.cpu_seconds)
            reports.busy = busy_share(context.binding.device, process.cpu_seconds)
            reports.joined = lambda: assignment.rank_info.key in context.joined
            reports.memory = lambda: memory_of_commands(context.binding.device, process.pids())
            reports.note = stack.enter_context(live_metrics_to(context.send, samples or 0, busy))
        stop = make_stop_signal(context, spec, assignment)
        run = CommandRun(group, process, stop, reports.read, context)
        run.watch()
    group.barrier_and_close()
    run.report_end(events)


def reported(task: TaskMessage) -> tuple[dict[int, EpochResult], str | None]:
    """Return the epochs that a command has reported in this run, and its newest existing checkpoint."""
    events = list(read_events(task.events / f"{task.name}.jsonl"))
    epochs = [event.record for event in events if event.kind == "epoch"]
    named = [str(event.data["path"]) for event in reversed(events) if event.kind == NAMED]
    # The script itself may have removed newer ones.
    checkpoint = next((path for path in named if Path(path).exists()), None)
    if named and checkpoint is None:
        print("none of the checkpoints that the command has named exists any more", flush=True)
    return {epoch.epoch: epoch for epoch in reversed(epochs)}, checkpoint


def newest_checkpoint(folder: Path, pattern: str) -> str | None:
    """Return the newest file or folder of a pattern; None if there is none, or the pattern is empty."""
    found = folder.glob(pattern) if pattern else ()
    return max(map(str, found), key=lambda path: Path(path).stat().st_mtime, default=None)


@dataclass
class EpochReports:
    """Epochs that a member's command reports, as events; on rank 0 alone.

    Parameters
    ----------
    history : dict of int to EpochResult
        Epochs of the run by number.
    note : callable
        Function called with the epoch, its finished samples, and the loss.
    clock : callable
        Clock that returns seconds since the epoch.
    heartbeat : callable
        Function called after each part of a copy of a checkpoint.
    starts_at : callable
        Function that returns the times of the launch of its ranks and of its process, in seconds since the
        epoch.
    busy, joined : callable
        Same as in `MemberTrainer`.
    memory : callable
        Function that returns the memory of the command in bytes, if nobody else uses its GPU.
    """

    spec: TrainingSpec
    events: EventWriter
    history: dict[int, EpochResult]
    note: Note = lambda *_: None
    clock: Callable[[], float] = time.time
    heartbeat: Callable[[], None] = lambda: None
    starts_at: Callable[[], tuple[float, float]] | None = None
    busy: Busy = lambda: None
    joined: Callable[[], bool] = lambda: False
    memory: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        (self.member,) = self.spec.ensemble.members
        folder = Path(self.spec.checkpoints)
        self._copies = BestCopies(folder, self.member, self.heartbeat)
        self._predictions = BestCopies(folder, self.member, self.heartbeat, PREDICTIONS)
        self._tensorboard: TensorBoardWriter | None = None
        self._marks: list[Mark] = []
        self._timed: list[Mark] | None = []
        """Marks by which the rate is timed; None once it is known."""
        self._began_at = self.clock()
        self._wrong = 0
        self._best: BestCheckpoint | None = None if self.history else NO_BEST

    def reason_to_stop(self) -> str | None:
        """Return why the member has converged by its stop rule; None if it has not."""
        epochs = (self.history[number] for number in sorted(self.history))
        return self.member.stop.reason_to_stop(tuple(e.metrics[self.member.stop.metric] for e in epochs))

    def read(self, line: bytes) -> str | None:
        """Write the events of a report; return the reason to stop after it, or None.

        Only the first wrong line gets an event.

        Raises
        ------
        BadInputError
            If the metric of the stop rule is missing in a finished epoch, or one is not finite.
        """
        try:
            report = parse_report(line)
            checkpoint = self._existing("checkpoint", report.checkpoint)
            predictions = self._existing("predictions", report.predictions)
        except WrongReportError as error:
            self._wrong += 1
            if self._wrong == 1:
                print(f"a report of the command is ignored: {error}: {printable(line)}", flush=True)
                self.events.write("report_ignored", line=printable(line), rule=str(error))
            return None
        if report.epoch is not None:
            self._note(report, report.epoch, self.clock())
        # After the epoch's event: without this one the next start trains the epoch again, and counts it once.
        if checkpoint is not None:
            self.events.write(NAMED, path=str(checkpoint), epoch=report.epoch)
            if report.epoch is not None and report.finished:
                self._keep(self._copies, checkpoint, report.epoch)
                self.report_best()
        if predictions is not None and report.epoch is not None:
            size, most = PATIENT.call(predictions.stat).st_size, self.member.keep.predictions or 0
            if size <= most:
                self._keep(self._predictions, predictions, report.epoch)
            else:
                allowed = f"`keep: {{predictions: ..}}` allows {most:,}"
                print(f"{predictions} is not kept: {size:,} bytes, and {allowed}", flush=True)
        return self.reason_to_stop()

    def report_best(self) -> None:
        """Report the best epoch with a copy of its checkpoint, if it is another one than before."""
        if (best := self._copies.best(list(self.history.values()))) != self._best:
            self._best = best
            self.events.write("best_checkpoint", **encode(best))

    def _keep(self, copies: BestCopies, named: Path, epoch: int) -> None:
        """Copy what was named for an epoch if it is one of the best; the script waits for it."""
        try:
            copies.take(named, epoch, list(self.history.values()))
        except ChangedMeanwhileError:
            print(f"{named} changed while it was copied: epoch {epoch} is not kept", flush=True)
        except (FileNotFoundError, shutil.Error) as error:
            print(f"{named} cannot be copied: epoch {epoch} is not kept: {error}", flush=True)

    def _existing(self, key: str, name: str | None) -> Path | None:
        path = None if name is None else Path(self.spec.ensemble.folder, name)
        if path is not None and not PATIENT.call(path.exists):
            raise WrongReportError(f"{key} must be a file or folder that exists")
        return path

    def _note(self, report: ScriptReport, epoch: int, now: float) -> None:
        mark = Mark(now, epoch, report.samples or 0.0, report.finished, report.seconds)
        self._marks = add_mark(self._marks, mark)
        self._time(mark)
        if self.starts_at and (report.seconds or not report.finished):
            # Its first report tells when training began.
            began_at = now - (report.seconds or 0.0)
            startup_s, restart_s = (max(0.0, began_at - start) for start in self.starts_at())
            is_alone = self.spec.allocation.gpus_alone(joined=self.joined()) > 0
            self.events.write(
                "first_step",
                startup_s=startup_s,
                restart_s=restart_s,
                peak_memory_bytes=self.memory() if is_alone else None,
            )
        self.starts_at = None
        self.note(epoch, int(report.samples or 0), report.metrics.get("loss"))
        if report.finished:
            self._finish(report, epoch, now)
        elif (search := self.spec.ensemble.search) and search.prune and search.prune.metric in report.metrics:
            samples = int(report.samples or 0)
            self.events.write(PART, epoch=epoch, samples=samples, metrics=report.metrics)

    def _time(self, mark: Mark) -> None:
        if self._timed is None or not is_new_run(self._timed, mark):
            return
        self._timed.append(mark)
        if len(self._timed) == 1:
            # What comes before is no training.
            self.busy()
        if times := known_times(self._timed, WANTED_IN_TRAINING):
            place = self.spec.allocation, self.joined(), self.member, self.spec.gpu_type
            timed = timed_rate(*place, 1 / times.mean_s, times.error, self.busy)
            self.events.write("rate", **encode(timed))
            self._timed = None

    def _finish(self, report: ScriptReport, epoch: int, now: float) -> None:
        check_metrics(report.metrics, self.member)
        ends = [mark for mark in self._marks if mark.finished]
        pace = epoch_pace(self._marks)
        result = EpochResult(
            epoch=epoch,
            metrics=report.metrics,
            # The time until the first report includes the command's start.
            duration_s=report.seconds or now - (ends[0].time if len(ends) > 1 else self._began_at),
            gpus=self.spec.allocation.gpus_alone(joined=self.joined()),
            finished_at=now,
            rate=pace.rate,
            batch_size=self.member.batch_size,
            gpu_type=self.spec.gpu_type,
            overhead_s=pace.overhead_s,
        )
        self._marks = self._marks[-1:]
        # A command that was killed before it wrote its checkpoint trains the epoch again.
        if epoch in self.history:
            return
        self.history[epoch] = result
        self.events.write("epoch", **encode(result), evaluate_s=0.0, samples=report.samples)
        path = tensorboard_file(Path(self.spec.checkpoints))
        self._tensorboard = self._tensorboard or TensorBoardWriter(path, int(report.samples or 0))
        self._tensorboard.show(result)
