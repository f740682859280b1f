"""Throughput of preprocessors: ``python -m hetctl.runtime.worker.measure_preprocessing FOLDER``."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from hetctl.model.ensemble import Ensemble
from hetctl.model.profile import PreprocessPoint
from hetctl.model.serialization import encode
from hetctl.runtime.data.collated import CollatedSource
from hetctl.runtime.data.part_files import path_on_node
from hetctl.runtime.data.partitions import partition_paths
from hetctl.runtime.data.sampler import sample_rng
from hetctl.runtime.data.shards import ShardReader, ShardSource
from hetctl.runtime.data.sources import ArraySource, SampleSource, as_sources
from hetctl.runtime.worker.reporting import report_failure
from hetctl.runtime.worker.user_functions import load_functions
from hetctl.storage.event_files import EventWriter
from hetctl.storage.profile_request import Measurements, read_measurements

PREPROCESS = "preprocess"
PREPROCESS_S = 1.0


def main(folder: Path) -> int:
    """Measure the preprocessing; write the results to an event file."""
    try:
        _measure(read_measurements(folder), folder / "events")
    except Exception as error:
        return report_failure(error, EventWriter(folder / "events", PREPROCESS))
    return 0


def _measure(measurements: Measurements, events: Path) -> None:
    load_functions(measurements.ensemble)
    for cores in measurements.preprocess_cores:
        rate = _preprocessing_rate(measurements.ensemble, cores)
        EventWriter(events, PREPROCESS).write("preprocess", **encode(PreprocessPoint(cores, rate)))


def _preprocessing_rate(ensemble: Ensemble, cores: int) -> float:
    """Return samples/s of ``input_fn`` in `cores` processes at once, each bound to a core, in total."""
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("fork")) as pool:
        outcomes = list(pool.map(_preprocess, [ensemble] * cores, range(cores)))
    # perf_counter() is CLOCK_MONOTONIC on Linux, so that times of several processes compare.
    seconds = max(end for _, _, end in outcomes) - min(start for _, start, _ in outcomes)
    return sum(count for count, _, _ in outcomes) / seconds


def _preprocess(ensemble: Ensemble, core: int) -> tuple[int, float, float]:
    """Return number of samples, start and end of calls that take at least `PREPROCESS_S` in total."""
    available = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {available[core % len(available)]})
    functions, partitions = load_functions(ensemble), ensemble.partitions
    # The ranks have ended, and with them the copies on this node.
    paths = [str(path_on_node(path)) for path in partitions.sources() if path] if partitions else []
    if partitions and not paths:
        paths = list(partition_paths(partitions).values())
    read = partial(functions.input_fn, ensemble.data, *paths[:1])
    samples, start = 0, time.perf_counter()
    training, validation = as_sources(read())
    if isinstance(training, CollatedSource):
        return _collate(training, max(member.batch_size for member in ensemble.members))
    if isinstance(training, ShardSource):
        return _read(training, max(member.batch_size for member in ensemble.members))
    if not isinstance(training, ArraySource):
        return _prepare(training)
    while time.perf_counter() - start < PREPROCESS_S:
        samples += len(training) + len(validation)
        training, validation = as_sources(read())
    return samples, start, time.perf_counter()


def _prepare(source: SampleSource) -> tuple[int, float, float]:
    samples, start = 0, time.perf_counter()
    while time.perf_counter() - start < PREPROCESS_S:
        number = samples % len(source)
        source.augment(source.prepare(number)[0], sample_rng(0, 1, number))
        samples += 1
    return samples, start, time.perf_counter()


def _collate(source: CollatedSource, batch_size: int) -> tuple[int, float, float]:
    samples, start = 0, time.perf_counter()
    while time.perf_counter() - start < PREPROCESS_S:
        source.batch([number % len(source) for number in range(samples, samples + batch_size)])
        samples += batch_size
    return samples, start, time.perf_counter()


def _read(source: ShardSource, batch_size: int) -> tuple[int, float, float]:
    samples, start, shard = 0, time.perf_counter(), 0
    while time.perf_counter() - start < PREPROCESS_S:
        size, reader = source.sizes[shard], ShardReader(source, shard)
        for first in range(0, size, batch_size):
            stop = min(first + batch_size, size)
            source.batch(reader.take(first, stop, first))
            samples += stop - first
            if time.perf_counter() - start >= PREPROCESS_S:
                break
        reader.close()
        shard = (shard + 1) % len(source.sizes)
    return samples, start, time.perf_counter()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
