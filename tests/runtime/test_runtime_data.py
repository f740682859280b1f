"""The order of an epoch, and how a group shares it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.core.errors import BadInputError
from hetctl.runtime.data import Batches, epoch_order, split_data


class Rank:
    def __init__(self, size, rank):
        self.size, self.rank = size, rank

    def agree(self, value):
        return value


def batches(samples, size, rank, batch_size, *, start=0, stop_after=10**9):
    x = np.arange(samples)
    order = epoch_order(samples, 1, 1)
    calls = iter(range(10**9))
    return Batches((x, x), order, start, batch_size, Rank(size, rank), lambda: next(calls) >= stop_after)


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


def test_orders_differ_by_epoch_and_seed_only():
    assert epoch_order(50, 1, 2).tolist() == epoch_order(50, 1, 2).tolist()
    assert epoch_order(50, 1, 2).tolist() != epoch_order(50, 1, 3).tolist()
    assert epoch_order(50, 1, 2).tolist() != epoch_order(50, 2, 2).tolist()


@pytest.mark.parametrize(
    "data",
    [None, 3, ([1, 2], [1, 2]), (([1], [1]), ([1, 2], [1])), (([], []), ([1], [1])), (([1], [1]),)],
)
def test_other_shapes_are_refused(data):
    with pytest.raises(BadInputError, match="input_fn returned"):
        split_data(data)
