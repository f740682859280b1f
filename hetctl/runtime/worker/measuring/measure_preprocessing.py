"""Throughput of preprocessors: ``python -m hetctl.runtime.worker.measuring.measure_preprocessing FOLDER``."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from hetctl.model.ensemble import Ensemble
from hetctl.model.interpreter import skip_last_collections
from hetctl.model.profile import PreprocessPoint
from hetctl.model.serialization import encode
from hetctl.runtime.data.named_arrays import CollatedSource
from hetctl.runtime.data.partition_folder import path_on_node
from hetctl.runtime.data.partitioned_data import partition_paths
from hetctl.runtime.data.sampler import sample_rng
from hetctl.runtime.data.shards import ShardSource
from hetctl.runtime.data.sources import ArraySource, Source, as_sources
from hetctl.runtime.worker.reporting import report_failure
from hetctl.runtime.worker.user_functions import load_functions
from hetctl.storage.event_files import EventWriter
from hetctl.storage.patience import PATIENT
from hetctl.storage.profile_request import read_measurements

PREPROCESS = "preprocess"
LEAST_S, MOST_S = 0.25, 1.0
"""Seconds after which calls end: `LEAST_S` after `ENOUGH_CALLS`, else `MOST_S`."""
ENOUGH_CALLS = 20


def main(folder: Path) -> int:
    """Measure the preprocessing; write the results to an event file."""
    events = EventWriter(folder / "events", PREPROCESS, patience=PATIENT)
    try:
        measurements = read_measurements(folder)
        load_functions(measurements.ensemble)
        for cores in measurements.preprocess_cores:
            rate = _preprocessing_rate(measurements.ensemble, cores)
            events.write("preprocess", **encode(PreprocessPoint(cores, rate)))
    except Exception as error:
        return report_failure(error, events)
    return 0


def _preprocessing_rate(ensemble: Ensemble, cores: int) -> float:
    """Return the total rate of ``input_fn`` in samples/s, in `cores` processes, each bound to a core."""
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("fork")) as pool:
        outcomes = list(pool.map(_preprocess, [ensemble] * cores, range(cores)))
    # perf_counter() is CLOCK_MONOTONIC on Linux, so times of several processes compare.
    seconds = max(end for _, _, end in outcomes) - min(start for _, start, _ in outcomes)
    return sum(count for count, _, _ in outcomes) / seconds


def _preprocess(ensemble: Ensemble, core: int) -> tuple[int, float, float]:
    """Return number of samples, start and end of repeated calls."""
    available = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {available[core % len(available)]})
    functions, partitions = load_functions(ensemble), ensemble.partitions
    # The copies on this node have ended with the ranks.
    paths = [str(path_on_node(path)) for path in partitions.sources() if path] if partitions else []
    if partitions and not paths:
        paths = list(partition_paths(partitions).values())
    read = partial(functions.input_fn, ensemble.data, *paths[:1])
    calls: Iterator[int]
    start = time.perf_counter()
    training, validation = as_sources(read())
    if isinstance(training, ArraySource):
        again = (sum(map(len, as_sources(read()))) for _ in itertools.count())
        calls = itertools.chain([len(training) + len(validation)], again)
    else:
        batch_size = max(member.batch_size for member in ensemble.members)
        start, calls = time.perf_counter(), _calls(training, batch_size)
    samples = 0
    for number, more in enumerate(calls, start=1):
        samples += more
        if time.perf_counter() - start >= (LEAST_S if number >= ENOUGH_CALLS else MOST_S):
            break
    return samples, start, time.perf_counter()


def _calls(source: Source, batch_size: int) -> Iterator[int]:
    """Read samples or batches without end; yield the number of samples of each call."""
    if isinstance(source, CollatedSource):
        for first in itertools.count(step=batch_size):
            source.batch([number % len(source) for number in range(first, first + batch_size)])
            yield batch_size
    elif isinstance(source, ShardSource):
        for shard in itertools.cycle(range(len(source.sizes))):
            samples = source.read(shard)
            while batch := list(itertools.islice(samples, batch_size)):
                source.batch(batch)
                yield len(batch)
    else:
        for number in itertools.cycle(range(len(source))):
            source.augment(source.prepare(number)[0], sample_rng(0, 1, number))
            yield 1


if __name__ == "__main__":
    skip_last_collections()
    sys.exit(main(Path(sys.argv[1]).resolve()))
