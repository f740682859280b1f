from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.hopper.schedule import UnitTimes
from hetctl.methods.hopper.worker_groups import (
    DATA_PARALLEL,
    HOPPER,
    HYBRID,
    grouped,
    groups,
    hopper_epochs,
    modes,
)
from hetctl.model.errors import BadInputError


@pytest.mark.parametrize(
    ("configs", "first"), [(1, DATA_PARALLEL), (4, DATA_PARALLEL), (5, HOPPER), (9, HOPPER)]
)
def test_the_rule_is_that_of_appendix_12(configs, first):
    assert modes(configs, workers=8)[0] == first
    assert (HYBRID in modes(configs, 8)) == (first == DATA_PARALLEL)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([HOPPER, HYBRID, DATA_PARALLEL]))
def test_every_worker_is_in_one_group_of_about_equal_size(configs, workers, mode):
    units = UnitTimes.from_matrix(np.arange(configs * workers).reshape(configs, workers) + 1.0)
    parts = groups(mode, units)
    assert sorted(worker for part in parts for worker in part) == list(range(workers))
    assert len(parts) == {HOPPER: workers, HYBRID: min(configs, workers), DATA_PARALLEL: 1}[mode]
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_like_workers_share_a_group_at_the_slowest_ones_rate():
    units = UnitTimes.from_matrix([[10.0, 30.0, 12.0, 28.0], [20.0, 60.0, 24.0, 56.0]])
    parts = groups(HYBRID, units)
    assert [set(part) for part in parts] == [{0, 2}, {1, 3}]
    times = grouped(units, parts, lambda size: 0.5 if size == 2 else 1.0)
    assert times.workers == ("w0+w2", "w3+w1")
    assert times.matrix.tolist() == [[24.0, 60.0], [48.0, 120.0]]


def test_one_group_takes_all_configurations_in_turn():
    units = UnitTimes.from_matrix([[10.0, 30.0], [20.0, 15.0]])
    assert grouped(units, groups(DATA_PARALLEL, units), lambda _: 1.0).matrix.tolist() == [[30.0], [20.0]]


def test_partitions_need_not_be_in_the_order_of_the_workers():
    seconds = np.full((1, 2, 2), np.inf)
    seconds[0, 0, 1], seconds[0, 1, 0] = 5.0, 7.0  # p0 on w1, p1 on w0
    units = UnitTimes(("a",), ("p0", "p1"), ("w0", "w1"), seconds)
    assert grouped(units, groups(HOPPER, units), lambda _: 1.0).matrix.tolist() == [[7.0, 5.0]]


def test_copies_are_not_for_groups():
    units = UnitTimes(("a",), ("p0",), ("w0", "w1"), np.ones((1, 1, 2)))
    with pytest.raises(BadInputError):
        groups(HYBRID, units)


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 40))
def test_members_hop_while_they_outnumber_half_of_the_gpus(epochs, gpus):
    hops = hopper_epochs(epochs, gpus)
    if hops:
        assert sum(count >= hops for count in epochs) > gpus / 2
    assert sum(count > hops for count in epochs) <= gpus / 2
