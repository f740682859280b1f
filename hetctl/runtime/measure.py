"""One profile point (FLEET, appendix B.3): at most 48 batches, the rate from the last 20."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path

from hetctl.core.codec import encode
from hetctl.core.measurement import Measurements, Point, read_measurements
from hetctl.core.profile import Machine, ProfilePoint
from hetctl.runtime.assignment import Assignment
from hetctl.runtime.checkpoint import CheckpointFolder, TrainingState
from hetctl.runtime.data import Batches
from hetctl.runtime.desk import Built, Desk, Share
from hetctl.runtime.feeds import Batch, Feed
from hetctl.runtime.machine import gpu_and_driver, peak_memory
from hetctl.runtime.pipeline import Sharing
from hetctl.runtime.reporting import reporter
from hetctl.runtime.stream import Order
from hetctl.runtime.trainer import check_metrics

BATCHES = 48
MEASURED_BATCHES = 20


def measure(assignment: Assignment, desk: Desk) -> None:
    """Measure one point; the result goes to its event file."""
    folder = Path(assignment.task.folder)
    measurements = read_measurements(folder)
    point = next(point for point in measurements.points if point.source == assignment.task.name)
    with ExitStack() as stack:
        result, built = _measure_point(measurements, point, assignment, desk, stack)
    reporter(assignment.task.events, point.source, built.group).write("point", **encode(result))
    built.group.leave()


def _measure_point(
    measurements: Measurements, point: Point, assignment: Assignment, desk: Desk, stack: ExitStack
) -> tuple[ProfilePoint, Built]:
    member, site = measurements.ensemble.member(point.member), measurements.site
    sharing = Sharing(preprocessors=site.cores_per_gpu)
    desk.supply(measurements.ensemble, sharing)
    clock = _StepClock(time.time())
    built = desk.build(measurements.ensemble, member, assignment.place, sharing, Share(), stack)
    feed = AgainAndAgain(built.training, BATCHES * member.batch_size * built.group.size)

    def after_step(position: int) -> None:
        clock.note(position)
        desk.sign()

    built.network.train(Batches(feed, 1, 0, built.group, lambda: False, after_step))
    first_evaluate_s, metrics = _timed_evaluation(built)
    evaluate_s, _ = _timed_evaluation(built)
    check_metrics(metrics | {"loss": 0.0}, member.stop.metric)
    gpu_type, driver = gpu_and_driver()
    result = ProfilePoint(
        member=point.member,
        gpus=point.gpus,
        rate=clock.rate(),
        fingerprint=member.fingerprint,
        batch_size=member.batch_size,
        measured_at=time.time(),
        machine=Machine(site.gpu_type or gpu_type, driver, built.framework.version()),
        samples_per_epoch=built.training.samples,
        startup_s=clock.startup_s + max(0.0, first_evaluate_s - evaluate_s),
        evaluate_s=evaluate_s,
        checkpoint_s=_checkpoint_seconds(built, Path(assignment.task.folder) / "scratch" / point.source),
        peak_memory_bytes=peak_memory(),
    )
    return result, built


class _StepClock:
    """Notes when each step ended, and how many samples the group had done by then.

    Parameters
    ----------
    began : float
        When the rank, which has been there for longer, turned to the member: seconds since the epoch.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._marks: list[tuple[float, int]] = []
        self.startup_s = 0.0

    def note(self, position: int) -> None:
        """Note a step that has just ended."""
        if not self._marks:
            self.startup_s = time.time() - self._began
        self._marks.append((time.perf_counter(), position))

    def rate(self) -> float:
        """Return samples/s over the last 20 batches, or over what there is after the first."""
        first = self._marks[-min(MEASURED_BATCHES + 1, len(self._marks))]
        last = self._marks[-1]
        return (last[1] - first[1]) / max(last[0] - first[0], 1e-9)


class AgainAndAgain:
    """One epoch of so many samples, made of as many epochs of a feed as that takes."""

    def __init__(self, feed: Feed, samples: int) -> None:
        self._feed = feed
        self.samples = samples
        self.sample = feed.sample

    @property
    def waited_s(self) -> float:
        """What the trainer has waited for batches."""
        return self._feed.waited_s

    def close(self) -> None:
        """Leave the feed to whoever opened it."""

    def batches(self, _epoch: int, start: int, _order: Order | None = None) -> Generator[Batch, None, None]:
        """Yield batches for ever."""
        for epoch in count(1):
            for batch, chunk in self._feed.batches(epoch, 0):
                stop = min(start + chunk.stop - chunk.start, self.samples)
                yield batch, replace(chunk, start=start, stop=stop)
                start = stop


def _timed_evaluation(built: Built) -> tuple[float, dict[str, float]]:
    began = time.perf_counter()
    metrics = built.network.evaluate(built.validation)
    return time.perf_counter() - began, metrics


def _checkpoint_seconds(built: Built, folder: Path) -> float:
    if built.group.rank != 0:
        return 0.0
    began = time.perf_counter()
    CheckpointFolder(folder).save(built.network.save(), TrainingState())
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds
