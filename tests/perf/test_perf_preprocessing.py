"""The least number of preprocessors that keeps trainers busy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.profile import PreprocessPoint
from hetctl.perf.preprocessing import preprocessors_needed, seen_points

MEASURED = [PreprocessPoint(1, 100.0), PreprocessPoint(2, 190.0), PreprocessPoint(4, 300.0)]


@pytest.mark.parametrize(
    ("demand", "cores"),
    [(0, 1), (100, 1), (100.1, 2), (190, 2), (245, 3), (246, 4), (300, 4), (301, 5), (374, 5), (750, 10)],
)
def test_the_least_that_meets_the_demand(demand, cores):
    assert preprocessors_needed(MEASURED, demand, 64) == cores


def test_no_more_than_there_are():
    assert preprocessors_needed(MEASURED, 1e9, 6) == 6
    assert preprocessors_needed(MEASURED, 1e9, 1) == 1


def test_without_a_measurement_one_has_to_do():
    assert preprocessors_needed([], 1e9, 8) == 1


def test_what_most_members_have_shown_in_training_counts_for_one_core():
    assert seen_points([None, 80.0, None, 100.0, 9000.0]) == (PreprocessPoint(1, 50.0),)
    assert seen_points([None, None]) == ()


def test_a_rate_that_too_few_have_limited_gets_more_of_them():
    rates = [30.0]
    for _ in range(4):
        rates.append(100.0 * preprocessors_needed(seen_points([100.0]), rates[-1], 8))
    assert rates == [30.0, 100.0, 200.0, 400.0, 800.0]


def test_a_rate_that_falls_does_not_ask_for_less():
    falling = [PreprocessPoint(1, 100.0), PreprocessPoint(2, 80.0), PreprocessPoint(4, 160.0)]
    assert preprocessors_needed(falling, 100, 8) == 1
    assert preprocessors_needed(falling, 130, 8) == 3


rates = st.floats(1.0, 1e4)


@given(st.lists(st.tuples(st.integers(1, 64), rates), unique_by=lambda p: p[0], max_size=6), rates, rates)
def test_more_demand_never_takes_fewer(points, demand, more):
    measured = [PreprocessPoint(cores, rate) for cores, rate in points]
    low, high = sorted((demand, more))
    assert 1 <= preprocessors_needed(measured, low, 64) <= preprocessors_needed(measured, high, 64) <= 64
