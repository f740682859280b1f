"""Collated batches: the order and shares of arrays, made a few ahead, in a thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from workbench import wait_for

from hetctl.model.errors import BadInputError, HetctlError
from hetctl.runtime.data.batch_thread import BATCHES_AHEAD
from hetctl.runtime.data.collated import Collated, CollatedSource
from hetctl.runtime.data.collated_loader import CollatedLoader
from hetctl.runtime.data.input_pipeline import refuse_own_batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sources import ArraySource

SAMPLES, SEED = 23, 7


def ragged(samples):
    """Batches as wide as their largest number."""
    numbers = np.array(samples)
    return np.ones((len(samples), numbers.max() + 1)), numbers


@pytest.fixture
def loader_of():
    """Return a function that opens a loader; it is closed after the test."""
    made = []

    def make(collate=ragged, chunk=5, rank=0, ranks=1, sizes=(), patience_s=60.0):
        source = CollatedSource(Collated(range(SAMPLES), collate), "training")
        stream = Stream(SAMPLES, chunk, SEED, rank=rank, ranks=ranks, sizes=sizes)
        made.append(CollatedLoader(source, stream, patience_s))
        return made[-1]

    yield make
    for loader in made:
        loader.close()
    wait_for(lambda: not any(thread.name == "batches" for thread in threading.enumerate()))


def numbers_in(batches):
    return [y.tolist() for (_, y), _ in batches]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_are_those_of_arrays(loader_of, ranks):
    arrays = ArraySource(np.arange(SAMPLES), np.arange(SAMPLES), "training")
    for rank in range(ranks):
        own = loader_of(rank=rank, ranks=ranks)
        other = ArrayLoader(arrays, Stream(SAMPLES, 5, SEED, rank=rank, ranks=ranks))
        for epoch, start in ((1, 0), (2, 0), (2, 10), (1, 20)):
            found, wanted = list(own.batches(epoch, start)), list(other.batches(epoch, start))
            for ((x, y), chunk), ((_, wanted_y), wanted_chunk) in zip(found, wanted, strict=True):
                assert (chunk.order, chunk.start, chunk.stop) == (
                    wanted_chunk.order, wanted_chunk.start, wanted_chunk.stop,
                )  # fmt: skip
                assert chunk.numbers.tolist() == wanted_chunk.numbers.tolist()
                # A rank without a share trains the example batch.
                assert y.tolist() == wanted_y.tolist()
                assert x.shape == (len(y), y.max() + 1)


def test_changing_sizes_leave_each_sample_once(loader_of):
    ranks = [loader_of(rank=rank, ranks=2, sizes=(3, 2)) for rank in range(2)]
    parts = [rank.batches(1, 0) for rank in ranks]
    seen = []
    for sizes in ((3, 2), (4, 1), (4, 1), (1, 4), (2, 3)):
        for rank in ranks:
            rank.split(sizes)
        pair = [next(part) for part in parts]
        chunk = pair[0][1]
        if chunk.stop - chunk.start == 5:
            assert tuple(len(own.numbers) for _, own in pair) == sizes
        seen += [number for _, own in pair for number in own.numbers.tolist()]
    assert sorted(seen) == list(range(SAMPLES))


def test_a_few_batches_are_made_ahead_and_no_more(loader_of):
    collated = []

    def collate(samples):
        collated.append(threading.current_thread().name)
        return ragged(samples)

    loader = loader_of(collate)
    batches = loader.batches(1, 0)
    next(batches)
    next(batches)
    # The first one was the example, made in this thread.
    wait_for(lambda: len(collated) == 1 + 2 + BATCHES_AHEAD)
    assert loader._thread._orders.empty()
    assert collated[1:] == ["batches"] * (2 + BATCHES_AHEAD)


def test_the_next_epoch_begins_while_others_wait(loader_of):
    collated = []

    def collate(samples):
        collated.append(list(samples))
        return ragged(samples)

    loader = loader_of(collate)
    list(loader.batches(1, 0))
    wait_for(lambda: len(collated) == 1 + 5 + BATCHES_AHEAD)
    ahead = collated[-BATCHES_AHEAD:]
    assert numbers_in(loader.batches(2, 0))[:BATCHES_AHEAD] == ahead
    wait_for(lambda: len(collated) == 1 + 10 + BATCHES_AHEAD)


def test_a_failure_in_the_thread_reaches_the_trainer(loader_of):
    def collate(samples):
        if 11 in samples:
            raise ValueError("rotten")
        return ragged(samples)

    loader = loader_of(collate)
    with pytest.raises(BadInputError, match=r"collating training samples .*: ValueError: rotten"):
        list(loader.batches(1, 0))


def test_a_batch_that_does_not_come_is_an_error(loader_of):
    released = threading.Event()

    def collate(samples):
        if len(samples) > 1:
            released.wait(60)
        return ragged(samples)

    with pytest.raises(HetctlError, match=r"no batch was made in 0\.1 s"):
        next(loader_of(collate, patience_s=0.1).batches(1, 0))
    released.set()


def test_readers_of_one_shape_refuse_it(loader_of):
    loader = loader_of()
    with pytest.raises(BadInputError, match="a pipeline needs batches of one shape"):
        refuse_own_batches(loader, "a pipeline")
    arrays = ArraySource(np.arange(3), np.arange(3), "training")
    refuse_own_batches(ArrayLoader(arrays, Stream(3, 2, SEED)), "a pipeline")
