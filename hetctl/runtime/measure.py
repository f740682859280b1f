"""One profile point (FLEET, appendix B.3): at most 48 batches, the rate from the last 20.

``python -m hetctl.runtime.measure FOLDER --member NAME --gpus K`` runs as one rank of the group;
``python -m hetctl.runtime.measure FOLDER --preprocess`` measures the preprocessing function.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path

from hetctl.core.codec import encode
from hetctl.core.ensemble import Ensemble
from hetctl.core.events import EventWriter
from hetctl.core.measurement import Measurements, Point, read_measurements
from hetctl.core.profile import Machine, PreprocessPoint, ProfilePoint
from hetctl.runtime.checkpoint import CheckpointFolder, TrainingState
from hetctl.runtime.data import Batches
from hetctl.runtime.feeds import Batch, Feed
from hetctl.runtime.functions import load_functions
from hetctl.runtime.group import Group, SingleRank
from hetctl.runtime.machine import gpu_and_driver, peak_memory
from hetctl.runtime.sources import ArraySource, Source, as_sources
from hetctl.runtime.step import Rank, build_rank, launched_at, reporter, run_step
from hetctl.runtime.stream import Order, sample_rng
from hetctl.runtime.trainer import check_metrics

BATCHES = 48
MEASURED_BATCHES = 20
PREPROCESS = "preprocess"
PREPROCESS_S = 1.0


def main() -> int:
    """Measure; the result goes to the event file of the point."""
    parser = argparse.ArgumentParser(prog="python -m hetctl.runtime.measure", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--member")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--preprocess", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    measurements = read_measurements(folder)
    events = folder / "events"
    if arguments.preprocess:
        return run_step(lambda: _report_preprocessing(measurements, events), events, PREPROCESS)
    point = Point(arguments.member, arguments.gpus)
    return run_step(lambda: _report_point(measurements, point, folder), events, point.source)


def _report_point(measurements: Measurements, point: Point, folder: Path) -> Group:
    with ExitStack() as stack:
        return _measure_point(measurements, point, folder, stack)


def _measure_point(measurements: Measurements, point: Point, folder: Path, stack: ExitStack) -> Group:
    launched = launched_at()
    member = measurements.ensemble.member(point.member)
    rank = build_rank(measurements.ensemble, member, point.gpus, measurements.site.device, stack)
    clock = _StepClock(launched)
    feed = AgainAndAgain(rank.training, BATCHES * member.batch_size * rank.group.size)
    rank.network.train(Batches(feed, 1, 0, rank.group, lambda: False, clock))
    first_evaluate_s, metrics = _timed_evaluation(rank)
    evaluate_s, _ = _timed_evaluation(rank)
    check_metrics(metrics | {"loss": 0.0}, member.stop.metric)
    gpu_type, driver = gpu_and_driver()
    result = ProfilePoint(
        member=point.member,
        gpus=point.gpus,
        rate=clock.rate(),
        fingerprint=member.fingerprint,
        batch_size=member.batch_size,
        measured_at=time.time(),
        machine=Machine(measurements.site.gpu_type or gpu_type, driver, rank.framework.version()),
        samples_per_epoch=rank.training.samples,
        startup_s=clock.startup_s + max(0.0, first_evaluate_s - evaluate_s),
        evaluate_s=evaluate_s,
        checkpoint_s=_checkpoint_seconds(rank, folder / "scratch" / point.source),
        peak_memory_bytes=peak_memory(),
    )
    reporter(folder / "events", point.source, rank.group).write("point", **encode(result))
    return rank.group


class _StepClock:
    """Notes when each step ended, and how many samples the group had done by then."""

    def __init__(self, launched: float) -> None:
        self._launched = launched
        self._marks: list[tuple[float, int]] = []
        self.startup_s = 0.0

    def __call__(self, position: int) -> None:
        if not self._marks:
            self.startup_s = time.time() - self._launched
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

    def batches(self, _epoch: int, start: int, _order: Order | None = None) -> Generator[Batch, None, None]:
        """Yield batches for ever."""
        for epoch in count(1):
            for batch, chunk in self._feed.batches(epoch, 0):
                stop = min(start + chunk.stop - chunk.start, self.samples)
                yield batch, replace(chunk, start=start, stop=stop)
                start = stop


def _timed_evaluation(rank: Rank) -> tuple[float, dict[str, float]]:
    began = time.perf_counter()
    metrics = rank.network.evaluate(rank.validation)
    return time.perf_counter() - began, metrics


def _checkpoint_seconds(rank: Rank, folder: Path) -> float:
    if rank.group.rank != 0:
        return 0.0
    began = time.perf_counter()
    CheckpointFolder(folder).save(rank.network.save(), TrainingState())
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds


def _report_preprocessing(measurements: Measurements, events: Path) -> Group:
    load_functions(measurements.ensemble)
    for cores in measurements.preprocess_cores:
        rate = _preprocessing_rate(measurements.ensemble, cores)
        EventWriter(events, PREPROCESS).write("preprocess", **encode(PreprocessPoint(cores, rate)))
    return SingleRank()


def _preprocessing_rate(ensemble: Ensemble, cores: int) -> float:
    """Run ``input_fn`` in `cores` processes at once, each bound to a core; samples/s together."""
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("fork")) as pool:
        outcomes = list(pool.map(_preprocess, [ensemble] * cores, range(cores)))
    seconds = max(end for _, _, end in outcomes) - min(start for _, start, _ in outcomes)
    return sum(count for count, _, _ in outcomes) / seconds


def _preprocess(ensemble: Ensemble, core: int) -> tuple[int, float, float]:
    """Return samples, start and end of calls that take `PREPROCESS_S` at least."""
    available = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {available[core % len(available)]})
    input_fn = load_functions(ensemble).input_fn
    samples, start = 0, time.perf_counter()
    training, validation = as_sources(input_fn(ensemble.data))
    if not isinstance(training, ArraySource):
        return _prepare(training)
    while time.perf_counter() - start < PREPROCESS_S:
        samples += len(training) + len(validation)
        training, validation = as_sources(input_fn(ensemble.data))
    return samples, start, time.perf_counter()


def _prepare(source: Source) -> tuple[int, float, float]:
    samples, start = 0, time.perf_counter()
    while time.perf_counter() - start < PREPROCESS_S:
        number = samples % len(source)
        source.augment(source.prepare(number)[0], sample_rng(0, 1, number))
        samples += 1
    return samples, start, time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
