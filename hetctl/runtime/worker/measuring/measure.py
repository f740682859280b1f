"""One profile point (FLEET, appendix B.3): the rate of full batches, and the other times of an epoch."""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path

from hetctl.model.ensemble import Member
from hetctl.model.profile import Hardware, ProfilePoint, shape_digest
from hetctl.model.serialization import encode
from hetctl.runtime.data.batches import Batches, held_out_batches
from hetctl.runtime.data.input_pipeline import Sharing
from hetctl.runtime.data.input_share import InputShare
from hetctl.runtime.data.loaders import Batch, Loader
from hetctl.runtime.data.sampler import Order
from hetctl.runtime.worker.async_checkpoint import Saver, ShardSaver
from hetctl.runtime.worker.checkpoint import CheckpointFolder, TrainingState
from hetctl.runtime.worker.context import BuiltMember, WorkerContext
from hetctl.runtime.worker.hardware import gpu_and_driver, peak_memory
from hetctl.runtime.worker.member_trainer import check_metrics
from hetctl.runtime.worker.messages import Assignment
from hetctl.runtime.worker.reporting import reporter
from hetctl.runtime.worker.step_clock import SteadyClock
from hetctl.storage.profile_request import Measurements, ProfileTarget, read_measurements

NO_END = 2**62
SAVES = 2
EPOCH_ENDS = 3
"""Number of ends of epochs that are trained; the first may include compilation, and does not count."""


def measure(assignment: Assignment, context: WorkerContext) -> None:
    """Measure one point; write the result to its event file."""
    folder = Path(assignment.task.folder)
    measurements = read_measurements(folder)
    point = next(point for point in measurements.points if point.source == assignment.task.name)
    with ExitStack() as stack:
        result, built = _measure_point(measurements, point, assignment, context, stack)
    reporter(assignment.task, built.group, context.send_written).write("point", **encode(result))
    built.group.barrier_and_close()


def _measure_point(
    measurements: Measurements,
    point: ProfileTarget,
    assignment: Assignment,
    context: WorkerContext,
    stack: ExitStack,
) -> tuple[ProfilePoint, BuiltMember]:
    member, site = measurements.ensemble.member(point.member), measurements.site
    ensemble = measurements.ensemble.of(member)
    sharing = Sharing(preprocessors=site.cores_per_gpu, timeouts=site.timeouts)
    # Ranks in a step of their own are started anew each time, framework included; others are forked once.
    step_s = max(0.0, time.time() - assignment.launched_at) if assignment.own_step else 0.0
    context.load_data(ensemble, sharing)
    began = time.perf_counter()
    built = context.build(
        *(ensemble, member, assignment.rank_info, sharing, InputShare(), stack),
        *(site.network, site.timeouts),
        partial=True,
    )
    built_s = time.perf_counter() - began
    steady = _train_steadily(built, member, context)
    times = steady.result()
    first_end_s, epoch_s = _epoch_ends(built, member, context, times.mean_s)
    # The first evaluation is traced: what it takes beyond the second one belongs to the start-up.
    first_evaluate_s, metrics = _timed_evaluation(built, 1, context)
    evaluate_s, _ = _timed_evaluation(built, 2, context)
    check_metrics(metrics | {"loss": 0.0}, member)
    gpu_type, driver = gpu_and_driver()
    once_s = (
        max(0.0, (steady.first_step_s or 0.0) - times.mean_s)
        + max(0.0, first_end_s - epoch_s)
        + max(0.0, first_evaluate_s - evaluate_s)
    )
    scratch = Path(assignment.task.folder) / "scratch" / point.source
    saves = point.gpus == member.min_gpus
    result = ProfilePoint(
        member=point.member,
        gpus=point.gpus,
        rate=member.chunk(point.gpus) / times.mean_s,
        fingerprint=member.fingerprint,
        batch_size=member.batch_size,
        measured_at=time.time(),
        machine=Hardware(
            assignment.task.gpu_type or site.gpu_type or gpu_type, driver, built.framework.version()
        ),
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
    )
    return result, built


def _train_steadily(built: BuiltMember, member: Member, context: WorkerContext) -> SteadyClock:
    """Train full batches until their rate is known."""
    clock = SteadyClock()
    # With the smaller last batches, which TensorFlow traced anew, rates were up to 2.2 times too low.
    loader = FullBatches(built.training, member.chunk(built.group.size))

    def after_step(_position: int) -> None:
        clock.note(batches.loss)
        context.heartbeat()

    most = member.micro_batch_size
    batches = Batches(
        loader, 1, 0, built.group, lambda: clock.done, after_step, most=most, in_step=member.shard
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
        Seconds beyond those of the same samples at the steady rate: the first time, and the mean of
        the later times; at least 0.
    """
    chunk = member.chunk(built.group.size)
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
    """Return the time that training loses by a checkpoint written beside it, in seconds, on average."""
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

    loader = TimedLoader(FullBatches(built.training, member.chunk(built.group.size)))
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
    """An endless epoch of only a loader's full batches; an epoch smaller than a batch is one batch.

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
    """A loader that records when it yielded its first batch; its owner closes it."""

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
    metrics = built.network.evaluate(held_out_batches(built.validation, epoch, context.heartbeat))
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
