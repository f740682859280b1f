"""Rates from timed steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.perf.step_times import LEAST_RUNS, MOST_S, WANTED_ERROR, is_known, step_times


def test_warm_up_does_not_count():
    assert step_times([1.0, 0.5] + [0.1] * 6).mean_s == pytest.approx(0.1)


def test_outliers_are_left_out_and_named():
    times = step_times([0.1] * 10 + [0.54] + [0.1] * 9)
    assert times.mean_s == pytest.approx(0.1)
    assert times.slow_steps_s == (0.54,)


def test_slow_steps_that_are_common_count():
    times = step_times([0.1, 0.3] * 20)
    assert times.mean_s == pytest.approx(0.2)
    assert times.slow_steps_s == ()


def test_error_covers_the_true_mean_nineteen_times_in_twenty():
    generator = random.Random(1)
    covered = 0
    for _ in range(1000):
        times = step_times([generator.gauss(0.1, 0.01) for _ in range(40)])
        covered += abs(times.mean_s - 0.1) <= times.error * times.mean_s
    assert 920 <= covered <= 980


def test_steady_steps_need_few_runs_and_noisy_ones_more():
    steady, noisy = [0.5] * LEAST_RUNS, [0.5, 0.7] * (LEAST_RUNS // 2)
    assert is_known(steady, sum(steady))
    assert not is_known(noisy, sum(noisy))
    assert not is_known(steady[:-1], sum(steady))
    assert not is_known([0.01] * 50, 0.5)


def test_the_noisiest_steps_are_timed_no_longer_than_the_limit():
    noisy = [0.1, 3.0] * 10
    assert step_times(noisy).error > WANTED_ERROR
    assert is_known(noisy, MOST_S)


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=60))
def test_mean_lies_among_the_runs(runs):
    times = step_times(runs)
    assert min(runs) * (1 - 1e-9) <= times.mean_s <= max(runs) * (1 + 1e-9)
    assert times.error >= 0
    assert times.spread >= 0
