"""`approximate`: the rearrangement and its bounds."""

import sys

import numpy as np
import pytest
from hop_rules import broken_by_schedule
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetctl.methods.hopper import SearchOptions
from hetctl.methods.hopper.approximate import apart, approximate, greedy, rearranged
from hetctl.methods.hopper.schedule import UnitTimes, lower_bound
from hetctl.model.errors import BadInputError


@st.composite
def matrices(draw, configs, workers):
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    times = random.uniform(draw(st.sampled_from([0, 0.5, 0.99])), 1, size=(draw(configs), draw(workers)))
    return times * random.choice([1, 1, 3], size=len(times))[:, None]


def is_optimal(matrix):
    """Return true if the method certainly finds an optimum (section 4.2): L_max >= (p^2 + p - 1) T_max."""
    partitions = matrix.shape[1]
    return bool(matrix.sum(axis=0).max() >= (partitions**2 + partitions - 1) * matrix.max())


@settings(max_examples=40, deadline=None)
@given(matrix=matrices(configs=st.integers(1, 14), workers=st.integers(1, 6)))
def test_the_makespan_is_within_the_bound_of_the_method(matrix):
    units = UnitTimes.from_matrix(matrix)
    makespan_s = approximate(units, SearchOptions()).makespan_s
    loads, workers = matrix.sum(axis=0), matrix.shape[1]
    assert makespan_s <= (loads.max() + (workers - 1) * matrix.max()) * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(matrix=matrices(configs=st.integers(80, 90), workers=st.integers(1, 4)))
def test_the_schedule_is_optimal_if_is_optimal_holds(matrix):
    assume(is_optimal(matrix))
    units = UnitTimes.from_matrix(matrix)
    schedule = approximate(units, SearchOptions())
    assert broken_by_schedule(schedule, units) == []
    assert schedule.makespan_s == pytest.approx(matrix.sum(axis=0).max())


def test_an_optimum_is_certain_from_p2_plus_p_minus_1_rows_on():
    ones = np.ones((11, 3))
    assert is_optimal(ones)
    assert not is_optimal(ones[:10])
    units = UnitTimes.from_matrix(ones)
    assert approximate(units, SearchOptions()).makespan_s == lower_bound(units) == 11


@settings(max_examples=25, deadline=None)
@given(matrix=matrices(configs=st.integers(1, 25), workers=st.integers(1, 6)))
def test_no_worker_gets_far_ahead(matrix):
    """The lemma of Steinitz; columns are raised so that all have the same sum."""
    matrix = matrix + (matrix.sum(axis=0).max() - matrix.sum(axis=0)) / len(matrix)
    order = rearranged(matrix)
    assert sorted(order) == list(range(len(matrix)))
    assert sorted(greedy(matrix)) == sorted(order)
    assert apart(matrix[order]) <= (matrix.shape[1] - 1) * matrix.max() * (1 + 1e-6) + 1e-9


def test_greed_is_not_always_enough(monkeypatch):
    """The order that is proved to be close enough makes an optimum just as well."""
    matrix = np.random.default_rng(0).uniform(0.5, 1, size=(60, 3))
    assert is_optimal(matrix)
    monkeypatch.setattr(
        sys.modules[greedy.__module__], "greedy", lambda rows: np.argsort(rows[:, 0] - rows[:, 1])
    )
    makespan_s = approximate(UnitTimes.from_matrix(matrix), SearchOptions()).makespan_s
    assert makespan_s == pytest.approx(matrix.sum(axis=0).max())


def test_partitions_on_several_workers_are_refused():
    units = UnitTimes(("a",), ("p",), ("x", "y"), np.ones((1, 1, 2)))
    with pytest.raises(BadInputError, match="several workers"):
        approximate(units, SearchOptions())
