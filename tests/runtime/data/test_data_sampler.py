"""Orders of samples, which preprocessors and trainers compute separately."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hetctl.runtime.data.sampler import Stream, epoch_order, moved, reassigned, sample_rng


def chunks(stream, count):
    return [stream.at(position) for position in range(count)]


@given(st.integers(1, 50), st.integers(1, 60), st.integers(1, 5), st.integers(0, 49), st.integers(1, 3))
def test_every_epoch_has_each_sample_once_whatever_the_chunks(samples, chunk, ranks, start, epoch):
    start = min(start, samples - 1)
    shares = [Stream(samples, chunk, 7, epoch, start, rank, ranks) for rank in range(ranks)]
    seen = {}
    for position in range(3 * samples + 3):
        parts = [share.at(position) for share in shares]
        assert len({(part.order, part.start, part.stop) for part in parts}) == 1
        sizes = [len(part.numbers) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        seen.setdefault(parts[0].order[1], []).extend(n for part in parts for n in part.numbers.tolist())
    assert seen[epoch] == epoch_order(samples, 7, epoch)[start:].tolist()
    assert seen[epoch + 1] == epoch_order(samples, 7, epoch + 1).tolist()


def test_a_stream_continues_at_an_interrupted_position():
    whole = chunks(Stream(10, 4, 1), 6)
    rest = chunks(Stream(10, 4, 1, start=8), 4)
    assert [(c.order, c.start, c.stop, c.numbers.tolist()) for c in rest] == [
        (c.order, c.start, c.stop, c.numbers.tolist()) for c in whole[2:]
    ]
    assert [(c.order[1], c.start, c.stop) for c in whole] == [
        *[(1, 0, 4), (1, 4, 8), (1, 8, 10)],
        *[(2, 0, 4), (2, 4, 8), (2, 8, 10)],
    ]


def test_epochs_have_different_orders_and_seeds_too():
    orders = [epoch_order(100, seed, epoch).tolist() for seed in (1, 2) for epoch in (1, 2)]
    assert len({tuple(order) for order in orders}) == 4
    assert not epoch_order(100, 1, 1).flags.writeable


def test_random_parts_depend_on_seed_epoch_and_number_alone():
    draws = {key: sample_rng(*key).random() for key in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2))}
    assert len(set(draws.values())) == 4
    assert all(sample_rng(*key).random() == draw for key, draw in draws.items())
    assert np.random.default_rng().random() not in draws.values()


def test_every_sample_of_every_epoch_has_chances_of_its_own():
    drawn = {
        (seed, epoch, number): tuple(sample_rng(seed, epoch, number).integers(0, 2**62, 3))
        for seed in (0, 1)
        for epoch in (1, 2, 3)
        for number in range(50)
    }
    assert len(set(drawn.values())) == len(drawn)
    for key, values in reversed(drawn.items()):
        assert tuple(sample_rng(*key).integers(0, 2**62, 3)) == values
    sample_rng(0, 1, 7).integers(0, 2, size=1, dtype=np.uint8)  # leaves some bits behind
    assert tuple(sample_rng(0, 1, 7).integers(0, 2**62, 3)) == drawn[0, 1, 7]


@given(samples=st.integers(1, 60), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_uneven_shares_cover_each_chunk_once(samples, sizes):
    streams = [
        Stream(samples, sum(sizes), 3, rank=rank, ranks=len(sizes), sizes=tuple(sizes))
        for rank in range(len(sizes))
    ]
    for position in range(-(-samples // sum(sizes))):
        chunks = [stream.at(position) for stream in streams]
        seen = np.concatenate([chunk.numbers for chunk in chunks])
        assert np.array_equal(seen, epoch_order(samples, 3, 1)[chunks[0].start : chunks[0].stop])
        if len(seen) == sum(sizes):
            assert [len(chunk.numbers) for chunk in chunks] == sizes


@given(
    samples=st.integers(1, 40),
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
)
def test_reassigned_samples_are_each_trained_once(samples, sizes):
    planned, now = (tuple(column) for column in zip(*sizes, strict=True))
    ranks = range(len(sizes))
    found = [reassigned(samples, planned, now, rank) for rank in ranks]
    trained = [position for kept, others in found for position in (*range(kept.start, kept.stop), *others)]
    assert sorted(trained) == list(range(samples))
    for rank, (kept, others) in enumerate(found):
        share = Stream(samples, samples, 0, rank=rank, ranks=len(sizes), sizes=now).share(0, samples)
        assert kept.stop - kept.start + len(others) == share.stop - share.start
    if planned == now:
        assert not any(others for _, others in found)


def test_as_few_samples_move_as_the_sizes_require():
    kept, others = zip(*(reassigned(12, (4, 4, 4), (6, 5, 1), rank) for rank in range(3)), strict=True)
    assert kept == (slice(0, 4), slice(4, 8), slice(8, 9))
    assert others == ((9, 10), (11,), ())
    assert moved((4, 4, 4), (6, 5, 1)) == 3
