"""Batches of an epoch, and their shares in a group."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sources import ArraySource


class Rank:
    def __init__(self, size, rank):
        self.size, self.rank = size, rank

    def broadcast(self, value):
        return value


def batches(samples, size, rank, batch_size, *, start=0, stop_after=10**9):
    x = np.arange(samples)
    loader = ArrayLoader(
        ArraySource(x, x, "training"), Stream(samples, batch_size * size, 1, rank=rank, ranks=size)
    )
    calls = iter(range(10**9))
    return Batches(loader, 1, start, Rank(size, rank), lambda: next(calls) >= stop_after)


@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 40))
def test_a_group_sees_every_sample_once_an_epoch(samples, size, batch_size):
    seen, weights = [], []
    ranks = [batches(samples, size, rank, batch_size) for rank in range(size)]
    for shares in zip(*ranks, strict=True):
        for rank, (x, y) in zip(ranks, shares, strict=True):
            assert len(x) == len(y) >= 1
            if rank.weight:
                seen.extend(x.tolist())
        weights.append(sum(rank.weight for rank in ranks))
    assert sorted(seen) == list(range(samples))
    assert weights == pytest.approx([1.0] * len(weights))
    assert all(rank.complete for rank in ranks)


@given(st.integers(1, 200), st.integers(1, 40), st.integers(0, 10))
def test_stopping_and_going_on_equals_not_stopping(samples, batch_size, steps):
    whole = [x.tolist() for x, _ in batches(samples, 1, 0, batch_size)]
    first = batches(samples, 1, 0, batch_size, stop_after=steps)
    parts = [x.tolist() for x, _ in first]
    assert len(parts) == min(steps, len(whole))
    parts += [x.tolist() for x, _ in batches(samples, 1, 0, batch_size, start=first.position)]
    assert parts == whole


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 10))
def test_a_pause_goes_on_with_the_same_source(samples, batch_size, every):
    whole = [x.tolist() for x, _ in batches(samples, 1, 0, batch_size)]
    paused = batches(samples, 1, 0, batch_size)
    paused._should_pause = lambda: paused.position >= paused.start + every * batch_size
    opened, loader = [], paused._loader.batches
    paused._loader.batches = lambda *place: opened.append(place) or loader(*place)
    parts = [[x.tolist() for x, _ in paused]]
    while paused.paused:
        assert paused.share == 1.0
        paused.resume()
        parts.append([x.tolist() for x, _ in paused])
    assert [batch for part in parts for batch in part] == whole
    assert all(len(part) == every for part in parts[:-1])
    assert len(opened) == 1
    assert paused.complete


@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 60), st.integers(1, 20), st.booleans())
def test_large_shares_come_in_batches_that_make_one_step(samples, size, chunk, most, in_step):
    x = np.arange(samples)
    seen, ranks = [], []
    for number in range(size):
        stream = Stream(samples, chunk, 1, rank=number, ranks=size)
        loader = ArrayLoader(ArraySource(x, x, "training"), stream)
        rank = Batches(loader, 1, 0, Rank(size, number), lambda: False, most=most, in_step=in_step)
        ranks.append([])
        for batch, _ in rank:
            assert 1 <= len(batch) <= most
            ranks[-1].append((rank.weight, rank.ends_step))
            seen += batch.tolist() if rank.weight else []
    steps = -(-samples // chunk)
    assert [sum(ends_step for _, ends_step in own) for own in ranks] == [steps] * size
    for together in zip(*ranks, strict=True) if in_step else ():
        assert len({ends_step for _, ends_step in together}) == 1
    assert sorted(seen) == list(range(samples))
    assert sum(weight for own in ranks for weight, _ in own) == pytest.approx(steps)
