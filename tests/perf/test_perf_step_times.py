"""Rates from timed steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.perf.step_times import (
    LEAST_RUNS,
    MOST_TIMED_S,
    WANTED_ERROR,
    EpochPace,
    Mark,
    add_mark,
    epoch_pace,
    is_known,
    is_measured,
    script_pace,
    step_times,
)


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
    assert is_known(noisy, MOST_TIMED_S)


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=60))
def test_mean_lies_among_the_runs(runs):
    times = step_times(runs)
    assert min(runs) * (1 - 1e-9) <= times.mean_s <= max(runs) * (1 + 1e-9)
    assert times.error >= 0
    assert times.spread >= 0


def within(epoch: int, began: float, samples: float, rate: float, every_s: float = 0.5) -> list[Mark]:
    """Return reports within an epoch that began at a time, without its end."""
    count = int(samples / rate / every_s)
    return [Mark(began + n * every_s, epoch, n * every_s * rate, finished=False) for n in range(1, count + 1)]


def test_an_epoch_has_the_rate_between_its_ends():
    assert epoch_pace([Mark(10, 1, 100), Mark(20, 2, 100)]) == EpochPace(10, 0)
    assert epoch_pace([Mark(10, 1, 100)]) == EpochPace()
    assert epoch_pace([Mark(10, 1, 100), Mark(20, 2, 0)]) == EpochPace()


def test_seconds_of_training_leave_the_rest_as_overhead():
    assert epoch_pace([Mark(10, 1, 100), Mark(20, 2, 100, seconds=8)]) == EpochPace(12.5, 2)
    assert epoch_pace([Mark(20, 2, 100, seconds=8)]) == EpochPace(12.5)


def test_reports_within_an_epoch_leave_its_evaluation_out():
    end = Mark(116, 2, 100)
    marks = [Mark(100, 1, 100), *within(2, 101, 100, 10), end]
    assert epoch_pace(marks) == EpochPace(pytest.approx(10), pytest.approx(6))
    # The first epoch after a start has a rate by them, too.
    assert epoch_pace(marks[1:]) == EpochPace(pytest.approx(10))
    # Too few of them are no rate of the epoch.
    few = [Mark(100, 1, 100), *marks[1:4], end]
    assert epoch_pace(few) == EpochPace(100 / 16, 0)
    assert epoch_pace(few[1:]) == EpochPace(95 / 14.5, 0)


def test_first_and_last_mark_of_an_epoch_are_kept():
    kept: list[Mark] = []
    for mark in (marks := [Mark(0, 1, 10), *within(2, 1, 100, 10)]):
        kept = add_mark(kept, mark)
    assert kept == [marks[0], marks[1], marks[-1]]
    other = Mark(30, 3, 1, finished=False)
    assert add_mark(kept, other) == [*kept, other]


def test_a_script_has_a_rate_a_start_and_ends_of_epochs():
    marks = [*within(1, 105, 100, 10), Mark(117, 1, 100), *within(2, 118, 100, 10), Mark(130, 2, 100)]
    pace = script_pace(marks, 100)
    assert pace is not None
    assert (pace.rate, pace.startup_s, pace.epoch_s) == (
        pytest.approx(10),
        pytest.approx(5),
        pytest.approx(3),
    )
    assert pace.epoch_samples == 100
    assert is_measured(marks)
    assert not is_measured(marks[:-1])


def test_whole_epochs_are_a_rate_if_there_is_no_other():
    marks = [Mark(12, 1, 100), Mark(22, 2, 100), Mark(32, 3, 100)]
    pace = script_pace(marks, 0)
    assert pace is not None
    assert (pace.rate, pace.startup_s, pace.epoch_s, pace.runs) == (10, pytest.approx(2), 0, 2)
    said = script_pace([Mark(12, 1, 100, seconds=5)], 0)
    assert said is not None
    assert (said.rate, said.startup_s) == (20, pytest.approx(7))


@pytest.mark.parametrize(
    "marks",
    [[], [Mark(9, 1, 100)], [Mark(9, 1, 0), Mark(10, 2, 0)], within(1, 0, 5, 10), [Mark(1, 1, 9, False)]],
    ids=["none", "one epoch", "no samples", "one within", "one part"],
)
def test_too_few_reports_are_no_rate(marks):
    assert script_pace(marks, 0) is None


def test_a_step_that_is_reported_twice_or_counted_back_is_no_run():
    marks = [*within(1, 0, 50, 10), *within(1, 10, 50, 10)]
    pace = script_pace(marks, 0)
    assert pace is not None
    assert pace.rate == pytest.approx(10)
