"""One profile point (FLEET, appendix B.3): the rate of full batches, and the other times of an epoch.

A member that is a command runs for a given time, and its reports are timed.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import field
from itertools import count
from pathlib import Path

from hetctl.model.ensemble import COMMAND, Member
from hetctl.model.errors import BadInputError
from hetctl.model.profile import ProfilePoint, shape_digest
from hetctl.model.serialization import encode
from hetctl.model.values import dataclass
from hetctl.perf.profile_points import wanted_error
from hetctl.perf.step_times import WANTED_ERROR, Mark, ScriptPace, is_measured, script_pace
from hetctl.runtime.data.batches import Batches, validation_batches
from hetctl.runtime.data.input_pipeline import Sharing
from hetctl.runtime.data.loaders import Batch, Loader
from hetctl.runtime.data.round_inputs import InputShare
from hetctl.runtime.data.sampler import Order
from hetctl.runtime.worker.async_checkpoint import Saver, ShardSaver
from hetctl.runtime.worker.checkpoint import CheckpointFolder, TrainingState
from hetctl.runtime.worker.context import BuiltMember, WorkerContext
from hetctl.runtime.worker.group import CollectiveBackend, Group
from hetctl.runtime.worker.hardware import (
    Busy,
    busy_share,
    hardware_here,
    memory_of_commands,
    peak_memory,
)
from hetctl.runtime.worker.member_trainer import StopSignal, check_metrics
from hetctl.runtime.worker.messages import Assignment
from hetctl.runtime.worker.scripts.command_process import (
    WrongReportError,
    parse_report,
    printable,
)
from hetctl.runtime.worker.scripts.command_run import (
    PROFILE_VARIABLE,
    CommandRun,
    own_variables,
    start_command,
)
from hetctl.runtime.worker.step_clock import SteadyClock
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.profile_request import Measurements, ProfileTarget, read_measurements
from hetctl.storage.project_copy import copy_project

NO_END = 2**62
SAVES = 2
EPOCH_ENDS = 3
"""Number of ends of epochs to train; the first may include compilation, and does not count."""


def measure(assignment: Assignment, context: WorkerContext) -> None:
    """Measure one point; write the result to its event file."""
    folder = Path(assignment.task.folder)
    measurements = read_measurements(folder)
    point = measurements.target(assignment.task.name)
    member, site = measurements.ensemble.member(point.member), measurements.site
    ensemble = measurements.ensemble.of(member)
    sharing = Sharing(preprocessors=site.cores_per_gpu, timeouts=site.timeouts)
    # In a step of their own, ranks and framework start anew each time; others are forked once.
    step_s = max(0.0, time.time() - assignment.launched_at) if assignment.own_step else 0.0
    context.load_data(ensemble, sharing)
    job_start_s = max(0.0, time.time() - assignment.launched_at - step_s)
    began = time.perf_counter()
    with ExitStack() as stack:
        built = context.build(
            *(ensemble, assignment.rank_info, sharing, InputShare(), stack),
            *(site.network, site.timeouts),
            partial=True,
        )
        built_s = time.perf_counter() - began
        busy = busy_share(context.binding.device)
        steady = _train_steadily(built, member, context, _wanted_error(measurements, point), busy)
        is_busy = busy() if point.gpus == 1 else None
        times = steady.result()
        first_end_s, epoch_s = _epoch_ends(built, member, context, times.mean_s)
        # The first evaluation is traced: its extra time over the second belongs to the start-up.
        first_evaluate_s, metrics = _timed_evaluation(built, 1, context)
        evaluate_s, _ = _timed_evaluation(built, 2, context)
        check_metrics(metrics | {"loss": 0.0}, member)
        once_s = (
            max(0.0, (steady.first_step_s or 0.0) - times.mean_s)
            + max(0.0, first_end_s - epoch_s)
            + max(0.0, first_evaluate_s - evaluate_s)
        )
        scratch, saves = folder / "scratch" / point.source, point.gpus == member.min_gpus
        result = ProfilePoint(
            member=point.member,
            gpus=point.gpus,
            rate=member.step_samples(point.gpus) / times.mean_s,
            fingerprint=member.fingerprint,
            batch_size=member.batch_size,
            measured_at=time.time(),
            machine=hardware_here(assignment.task.gpu_type or site.gpu_type, built.framework.version()),
            samples_per_epoch=measurements.ensemble.samples_per_epoch or built.training.samples,
            startup_s=step_s + built_s + once_s,
            evaluate_s=evaluate_s,
            checkpoint_s=_checkpoint_seconds(built, member, scratch),
            save_s=_save_seconds(built, member, context, times.mean_s, scratch) if saves else None,
            peak_memory_bytes=peak_memory(),
            epoch_s=epoch_s,
            rate_error=times.error,
            step_spread=times.spread,
            steps=steady.steps,
            slow_steps_s=times.slow_steps_s,
            shape=shape_digest(member, measurements.ensemble.rate_keys),
            job_start_s=job_start_s,
            busy=is_busy,
        )
    context.reporter(assignment.task).write("point", **encode(result))
    context.group.barrier_and_close()


def _wanted_error(measurements: Measurements, point: ProfileTarget) -> float:
    """Return how exactly the rate of a point is measured."""
    known = {each.member for each in measurements.known}
    least = min(each.gpus for each in measurements.points if each.member == point.member)
    # Only members that decide the makespan are measured on further numbers of GPUs.
    if measurements.planned_gpus is None or point.member in known or point.gpus > least:
        return WANTED_ERROR
    return wanted_error(len(known | {each.member for each in measurements.points}))


def _train_steadily(
    built: BuiltMember, member: Member, context: WorkerContext, wanted_error: float, busy: Busy
) -> SteadyClock:
    clock = SteadyClock(wanted_error=wanted_error)
    # Smaller last batches, which TensorFlow traces anew, made rates up to 2.2 times too low.
    loader = FullBatches(built.training, member.step_samples(built.group.size))

    def after_step(_position: int) -> None:
        clock.note(batches.loss)
        if not clock.steps:
            # The first step counts for nothing.
            busy()
        context.heartbeat()

    batches = Batches(
        *(loader, 1, 0, built.group, lambda: clock.done, after_step),
        most=member.micro_batch_size,
        in_step=member.shard,
    )
    built.network.train(batches)
    return clock


def _epoch_ends(
    built: BuiltMember, member: Member, context: WorkerContext, step_s: float
) -> tuple[float, float]:
    """Train the last full batch of an epoch and the rest after it, a few times.

    Returns
    -------
    tuple of float
        Extra seconds over the same samples at the steady rate, at least 0: the first time, and the mean
        of the later times.
    """
    chunk = member.step_samples(built.group.size)
    samples = built.training.samples
    left = min(samples, chunk + samples % chunk)
    beyond = []
    for epoch in range(1, EPOCH_ENDS + 1):
        loader = TimedLoader(built.training)
        batches = Batches(
            loader,
            epoch,
            samples - left,
            built.group,
            lambda: False,
            lambda _position: context.heartbeat(),
            most=member.micro_batch_size,
            in_step=member.shard,
        )
        built.network.train(batches)
        beyond.append(time.perf_counter() - loader.given_at - left / chunk * step_s)
    return max(0.0, beyond[0]), max(0.0, statistics.fmean(beyond[1:]))


def _save_seconds(
    built: BuiltMember, member: Member, context: WorkerContext, step_s: float, folder: Path
) -> float:
    """Return the mean seconds that training loses to a checkpoint written beside it."""
    if member.shard:
        # Training waits until it is written.
        return _checkpoint_seconds(built, member, folder)
    lost = [_save_beside(built, member, context, step_s, folder) for _ in range(SAVES)]
    shutil.rmtree(folder, ignore_errors=True)
    return max(0.0, statistics.fmean(lost))


def _save_beside(
    built: BuiltMember, member: Member, context: WorkerContext, step_s: float, folder: Path
) -> float:
    written, steps = threading.Event(), 0

    def after_step(_position: int) -> None:
        nonlocal steps
        steps += 1
        context.heartbeat()

    loader = TimedLoader(FullBatches(built.training, member.step_samples(built.group.size)))
    began = time.perf_counter()
    with closing(Saver(CheckpointFolder(folder))) as saver:
        if built.group.rank == 0:
            saver.save(built.network.save(), TrainingState(), lambda *_: written.set())
        saved_s = time.perf_counter() - began
        most = member.micro_batch_size
        built.network.train(Batches(loader, 1, 0, built.group, written.is_set, after_step, most=most))
        trained_s = time.perf_counter() - loader.given_at if loader.given_at else 0.0
    return saved_s + trained_s - steps * step_s


class FullBatches(Loader):
    """Endless epoch of a loader's full batches alone; an epoch smaller than a batch is one batch.

    The loader's owner closes it.
    """

    def __init__(self, loader: Loader, chunk: int) -> None:
        super().__init__(NO_END, loader.sample)
        self._loader, self._chunk = loader, min(chunk, loader.samples)

    def batches(self, _epoch: int, _start: int, _order: Order | None = None) -> Generator[Batch, None, None]:
        """Yield batches without end."""
        for epoch in count(1):
            for batch, chunk in self._loader.batches(epoch, 0):
                if chunk.stop - chunk.start == self._chunk:
                    yield batch, chunk


class TimedLoader(Loader):
    """Loader that records when it yielded its first batch; its owner closes it."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader.samples, loader.sample)
        self._loader, self.given_at = loader, 0.0

    def batches(self, epoch: int, start: int, order: Order | None = None) -> Generator[Batch, None, None]:
        """Yield the loader's batches."""
        for batch in self._loader.batches(epoch, start, order):
            self.given_at = self.given_at or time.perf_counter()
            yield batch


def _timed_evaluation(
    built: BuiltMember, epoch: int, context: WorkerContext
) -> tuple[float, dict[str, float]]:
    began = time.perf_counter()
    metrics = built.network.evaluate(validation_batches(built.validation, epoch, context.heartbeat))
    return time.perf_counter() - began, metrics


def _checkpoint_seconds(built: BuiltMember, member: Member, folder: Path) -> float:
    checkpoints = CheckpointFolder(folder)
    began = time.perf_counter()
    if member.shard:
        saver = ShardSaver(checkpoints, built.network, built.group)
        saver.save(built.network.save(), TrainingState(), lambda *_: None)
    elif built.group.rank == 0:
        checkpoints.save(built.network.save(), TrainingState())
    if built.group.rank != 0:
        return 0.0
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds


GRACE_S = 10.0
"""Grace period in seconds of a command that has run long enough."""
SAMPLE_EVERY_S = 1.0
"""Seconds between two samples of the memory of the command."""
ADVICE = (
    "let the script call hetctl.report(epoch=.., finished=False, samples=..) within its epochs, give it more"
    " time with --for, or import a rate that you know with `hetctl profile import FILE`"
)


def measure_command(assignment: Assignment, context: WorkerContext) -> None:
    """Run a member's command for the given time; write its rate to the event file of the point.

    Raises
    ------
    BadInputError
        On rank 0, if the command's reports give no rate.
    """
    measurements = read_measurements(Path(assignment.task.folder))
    point = measurements.target(assignment.task.name)
    site = measurements.site
    group = context.join(assignment.rank_info, site.network, site.timeouts, CollectiveBackend())
    times, began = _run(measurements, point, assignment, group, context)
    group.barrier_and_close()
    start = assignment.launched_at if assignment.own_step else began
    if group.rank != 0:
        return
    ensemble, pace = measurements.ensemble, times.pace(start)
    member = ensemble.member(point.member)
    seen = None if pace.epoch_samples is None else int(pace.epoch_samples)
    result = ProfilePoint(
        member=member.name,
        gpus=point.gpus,
        rate=pace.rate,
        fingerprint=member.fingerprint,
        batch_size=member.batch_size,
        measured_at=time.time(),
        machine=hardware_here(assignment.task.gpu_type or site.gpu_type, COMMAND),
        samples_per_epoch=ensemble.samples_per_epoch or seen,
        startup_s=pace.startup_s,
        peak_memory_bytes=times.peak_bytes,
        epoch_s=pace.epoch_s,
        rate_error=pace.per_sample.error if pace.runs > 1 else None,
        step_spread=pace.per_sample.spread,
        steps=pace.runs,
        shape=shape_digest(member, ensemble.rate_keys),
        job_start_s=max(0.0, start - assignment.launched_at),
    )
    context.reporter(assignment.task).write("point", **encode(result))


def _run(
    measurements: Measurements,
    point: ProfileTarget,
    assignment: Assignment,
    group: Group,
    context: WorkerContext,
) -> tuple[ReportTimes, float]:
    """Run the command until its rate is known or its time is over; also return the time of its start."""
    member, folder = measurements.ensemble.member(point.member), Path(assignment.task.folder)
    scratch, project = folder / "scratch" / point.source, Path(measurements.ensemble.folder)
    checkpoints, copy = str(scratch / "checkpoints"), scratch / "project"
    if group.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        for made in (scratch.parent, scratch, Path(checkpoints)):
            make_private_folder(made)
        copy_project(project, copy, context.heartbeat)
    group.broadcast(None)
    deadline = time.time() + measurements.command_s
    own = own_variables(member, folder.name, 0, 0, checkpoints, deadline) | {PROFILE_VARIABLE: "1"}
    words = member.command_line(checkpoints)
    with ExitStack() as stack:
        process = start_command(group, context, member, words, project, own, GRACE_S, stack, copy)
        times = ReportTimes(lambda: memory_of_commands(context.binding.device, process.pids()))
        stop = StopSignal(times.sample_memory, deadline)
        CommandRun(group, process, stop, times.read, context).watch()
    if group.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
    return times, process.began_at


@dataclass
class ReportTimes:
    """Arrivals of a command's reports, and its memory.

    Parameters
    ----------
    memory : callable
        Function that returns the memory of the command in bytes.
    """

    memory: Callable[[], int]
    marks: list[Mark] = field(default_factory=list)
    peak_bytes: int = 0
    _lines: int = 0
    _wrong: str = ""
    _next_sample: float = 0.0

    def read(self, line: bytes) -> str | None:
        """Note the time of a report; return a reason to stop once the rate is known, or None.

        The rate needs the end of an epoch with its evaluation. Checkpoints and metrics do not matter.
        """
        self._lines += 1
        try:
            report = parse_report(line)
        except WrongReportError as error:
            self._wrong = self._wrong or f"{error}: {printable(line)}"
            return None
        if report.epoch is not None:
            samples = report.samples or 0.0
            self.marks.append(Mark(time.time(), report.epoch, samples, report.finished, report.seconds))
        return "its rate is known" if is_measured(self.marks) else None

    def sample_memory(self) -> None:
        """Note the memory of the command from time to time."""
        if (now := time.monotonic()) >= self._next_sample:
            self._next_sample = now + SAMPLE_EVERY_S
            self.peak_bytes = max(self.peak_bytes, self.memory())

    def pace(self, began: float) -> ScriptPace:
        """Return the pace of a command that began at `began`, in seconds since the epoch.

        Raises
        ------
        BadInputError
            If it has reported too little.
        """
        if (pace := script_pace(self.marks, began)) is None:
            raise BadInputError(f"{self._what_lacks()} in {time.time() - began:.0f} s", ADVICE)
        return pace

    def _what_lacks(self) -> str:
        if not self._lines:
            return "the script has reported nothing"
        if not self.marks and self._wrong:
            return f"the script has reported nothing, but written lines that are no reports ({self._wrong})"
        if not any(mark.samples for mark in self.marks):
            return "the script has reported no samples"
        return f"the script has reported too little for a rate ({self._lines} reports)"
