"""Batches made a few ahead, in a thread: collated ones, and those of samples in shards."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workbench import wait_for

from hetctl.model.errors import BadInputError, HetctlError, TransientInputError
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.input_pipeline import BATCHES_AHEAD, CollatedLoader, ShardLoader, refuse_own_batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.named_arrays import Collated, CollatedSource
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.shards import Shards, ShardSource
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.data.write_partitions import _divisible
from hetctl.runtime.worker.group import Group

SAMPLES, SEED = 23, 7
SIZES = (7, 4, 9, 3)
"""Samples of the shards."""
FIRST = (0, 7, 11, 20)
TOTAL = sum(SIZES)


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
    wait_for(lambda: not any(thread.name.startswith("batches") for thread in threading.enumerate()))


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
    assert loader._maker._work_queue.empty()
    assert collated[1:] == ["batches_0"] * (2 + BATCHES_AHEAD)


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


def read(shard):
    """Samples whose target is their number."""
    for number in range(SIZES[shard]):
        yield np.full(2, float(shard)), FIRST[shard] + number


def source_of(reader=read, samples=SIZES, **how):
    return ShardSource(Shards(range(len(SIZES)), reader, samples, **how), "training")


@pytest.fixture
def shard_loader_of():
    """Return a function that opens a loader; all are closed after the test."""
    made = []

    def make(reader=read, chunk=5, rank=0, ranks=1, sizes=(), **how):
        stream = Stream(TOTAL, chunk, SEED, rank=rank, ranks=ranks, sizes=sizes)
        made.append(ShardLoader(source_of(reader, **how), stream, 60.0))
        return made[-1]

    yield make
    for loader in made:
        loader.close()
    wait_for(lambda: not any(thread.name.startswith("batches") for thread in threading.enumerate()))


@pytest.mark.parametrize("mix", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_train_each_sample_once_in_an_epoch(shard_loader_of, ranks, mix):
    loaders = [shard_loader_of(rank=rank, ranks=ranks, mix=mix) for rank in range(ranks)]
    for epoch in (1, 2):
        seen = Counter()
        for batches in zip(*(loader.batches(epoch, 0) for loader in loaders), strict=True):
            assert len({(chunk.start, chunk.stop, chunk.order) for _, chunk in batches}) == 1
            assert sum(len(chunk.numbers) for _, chunk in batches) == batches[0][1].stop - batches[0][1].start
            for (x, y), chunk in batches:
                # A rank without a share trains the example batch.
                assert y.tolist() == (chunk.numbers.tolist() or [0])
                assert x.shape == (len(y), 2)
                seen.update(chunk.numbers.tolist())
        assert seen == Counter(range(TOTAL))


def test_epochs_read_shards_in_other_orders_and_batches_mix_them(shard_loader_of):
    orders = [
        [int(x[0, 0]) for (x, _), _ in shard_loader_of(chunk=1).batches(epoch, 0)] for epoch in (1, 2, 3)
    ]
    assert all(Counter(order) == Counter(orders[0]) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    (x, _), _ = next(shard_loader_of(chunk=4, mix=4).batches(1, 0))
    assert sorted(x[:, 0]) == [0, 1, 2, 3]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_changed_sizes_and_stops_leave_each_sample_once(splits, mix, stop):
    seen = Counter()
    loaders = [
        ShardLoader(source_of(mix=mix), Stream(TOTAL, 6, SEED, rank=rank, ranks=2), 60.0) for rank in (0, 1)
    ]
    order, start = None, 0
    for step, batches in enumerate(zip(*(loader.batches(1, 0) for loader in loaders), strict=True)):
        for (_, y), chunk in batches:
            assert y.tolist() == (chunk.numbers.tolist() or [0])
            seen.update(chunk.numbers.tolist())
        order, start = batches[0][1].order, batches[0][1].stop
        if step == stop:
            break
        for loader in loaders:
            loader.split(splits[step % len(splits)])
    for loader in loaders:
        loader.close()
    with closing(ShardLoader(source_of(mix=1), Stream(TOTAL, 4, 99), 60.0)) as alone:
        for (_, y), _ in alone.batches(1, start, order):
            seen.update(y.tolist())
    assert seen == Counter(range(TOTAL))


def test_the_end_of_an_epoch_may_come_first(shard_loader_of):
    """As `hetctl profile` measures it."""
    for ranks in (1, 2):
        loaders = [shard_loader_of(rank=rank, ranks=ranks) for rank in range(ranks)]
        rest = Counter(n for own in loaders for _, chunk in own.batches(1, 15) for n in chunk.numbers)
        whole = [chunk for own in loaders for _, chunk in own.batches(1, 0) if chunk.start >= 15]
        assert rest == Counter(number for chunk in whole for number in chunk.numbers)


def test_a_batch_that_was_not_trained_comes_again(shard_loader_of):
    loader = shard_loader_of()
    stopped = Batches(loader, 1, 0, Group(), lambda: False)
    taken = []
    for _, y in stopped:
        taken.append(y.tolist())
        if len(taken) == 3:
            break
    assert (stopped.position, len(stopped.order)) == (10, 6)
    resumed = Batches(loader, 1, stopped.position, Group(), lambda: False, order=stopped.order)
    rest = [y.tolist() for _, y in resumed]
    assert rest[0] == taken[2]
    assert sorted(number for batch in (*taken[:2], *rest) for number in batch) == list(range(TOTAL))


def test_a_few_batches_are_read_ahead_and_no_more(shard_loader_of):
    given_out = []

    def counted(shard):
        for sample in read(shard):
            given_out.append(shard)
            yield sample

    loader = shard_loader_of(counted, chunk=2)
    given_out.clear()
    with closing(loader.batches(1, 0)) as batches:
        for number in range(1, 6):
            next(batches)
            wait_for(lambda most=2 * (number + BATCHES_AHEAD): len(given_out) >= most)
            # The end of a shard shows only in a look beyond it, which gives out nothing.
            assert len(given_out) <= 2 * (number + BATCHES_AHEAD)


def failing(shard):
    yield from read(shard)
    if shard == 2:
        raise OSError("disk on fire")


def too_short(shard):
    for _, sample in zip(range(3), read(shard), strict=False):
        yield sample


def too_long(shard):
    yield from read(shard)
    yield np.zeros(2), 99


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (failing, r"reading shard 2 of training \(2\): OSError: disk on fire"),
        (too_short, r"shard \d of training \(\d\) ended after 3 samples, but was given as \d"),
        (too_long, r"shard \d of training \(\d\) has more samples than the \d that were given"),
    ],
)
def test_a_shard_that_is_not_as_said_is_named(shard_loader_of, reader, words):
    with pytest.raises(BadInputError, match=words):
        list(shard_loader_of(reader).batches(1, 0))


def test_other_shards_than_those_of_a_checkpoint_are_refused(shard_loader_of):
    (_, chunk), *_ = shard_loader_of().batches(1, 0)
    with pytest.raises(TransientInputError, match="18 samples left in epoch 1, where the checkpoint has 13"):
        next(shard_loader_of().batches(1, 10, chunk.order))


@pytest.mark.parametrize(
    ("shards", "samples", "how", "words"),
    [
        ([], 3, {}, "got no shards"),
        (["a", "b"], [3], {}, "got 2 shards, but the samples of 1"),
        (["a"], 0, {}, "whole numbers above 0"),
        (["a"], 2.5, {}, "whole numbers above 0"),
        (["a"], 2, {"mix": 0}, "mix of Shards is 0"),
        (["a"], 2, {"collate_fn": 3}, "must be functions"),
    ],
)
def test_wrong_shards_are_refused(shards, samples, how, words):
    with pytest.raises(BadInputError, match=words):
        Shards(shards, read, samples if isinstance(samples, int | list) else [samples], **how)


def test_numbers_of_numpy_are_taken():
    for samples in (np.int64(3), np.array([3, 3])):
        counts = Shards([0, 1], read, samples).samples
        assert (counts, {type(count) for count in counts}) == ([3, 3], {int})


def test_samples_may_be_mappings_or_collated():
    def named(shard):
        return ({"a": x, "b": np.int64(y)} for x, y in read(shard))

    pairs = source_of(lambda shard: ((x, 1) for x in named(shard)))
    (x, y) = pairs.sample
    assert (x.dtype.names, y.tolist()) == (("a", "b"), [1])

    def collate(samples):
        return np.stack([sample["a"] for sample in samples]), np.array([s["b"] for s in samples])

    x, y = source_of(named, collate_fn=collate).sample
    assert (x.shape, y.tolist()) == ((1, 2), [0])
    with pytest.raises(BadInputError, match="making a batch of training: IndexError") as raised:
        source_of(lambda shard: (x for x, _ in read(shard)), collate_fn=lambda samples: samples[7])
    assert "collate_fn" in raised.value.hint


def test_readers_of_samples_by_number_refuse_shards(shard_loader_of):
    with pytest.raises(
        BadInputError, match="Shards, and a pipeline needs samples that can be read by number"
    ):
        refuse_own_batches(shard_loader_of(), "a pipeline")
    with pytest.raises(BadInputError, match="the samples for training are Shards"):
        _divisible("training", source_of())
