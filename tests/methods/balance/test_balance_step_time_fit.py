import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.balance.step_time_fit import POINTS, WINDOW, StepTimeHistory, fit_lines

NOISE = np.full(1, 0.03)


def history_of(*points):
    history = StepTimeHistory(1)
    for batch, seconds in points:
        history.add(np.array([float(batch)]), np.array([seconds]), np.array([seconds]))
    return history


def fit(history, near, launch=0.0, noise=NOISE):
    return fit_lines(history, np.array([float(near)]), noise, np.array([launch]))


def test_one_point_is_fitted_with_the_prior_launch_overhead():
    found = fit(history_of((32, 2.0)), 32, launch=0.5)
    assert found.seconds == pytest.approx([2.0], rel=0.02)
    assert found.lines.launch == pytest.approx([0.5], rel=0.02)


def test_two_precise_points_outweigh_the_prior_launch_overhead():
    found = fit(history_of((32, 2.0), (24, 1.75)), 24, launch=0.0, noise=np.full(1, 0.001))
    assert found.lines.seconds(np.array([16.0])) == pytest.approx([1.5], rel=0.02)


def test_points_far_away_count_less():
    bent = history_of((1, 1.0), (100, 2.0), (110, 2.15))
    assert fit(bent, 105).seconds == pytest.approx([2.075], rel=0.01)
    assert fit(bent, 2).seconds == pytest.approx([1.0], rel=0.05)


def test_an_average_is_surer_than_one_point():
    one, many = fit(history_of((8, 1.0)), 8), fit(history_of(*[(8, 1.0)] * 25), 8)
    assert many.error < one.error / 4
    assert one.error == pytest.approx([0.03], rel=0.05)


def test_far_from_all_points_nothing_is_sure():
    found = fit(history_of(*[(8, 1.0)] * 25), 24)
    assert found.error > 0.1


def test_iterations_in_a_row_with_the_same_batch_are_one_point():
    history = history_of((8, 1.0), (8, 2.0), (9, 3.0), (8, 4.0))
    assert history.batches[0, -3:].tolist() == [8, 9, 8]
    assert history.seconds[0, -3:].tolist() == [1.5, 3.0, 4.0]
    assert history.counts[0, -4:].tolist() == [0, 2, 1, 1]


def test_the_oldest_points_and_iterations_are_forgotten():
    history = history_of((1, 9.0), *[(8 + number % 2, 3.0) for number in range(POINTS)])
    assert history.batches.min() == 8
    history = history_of(*[(8, 1.0)] * WINDOW, *[(8, 3.0)] * (5 * WINDOW))
    assert history.seconds[0, -1] > 2.95


def test_a_restart_keeps_the_last_iterations_as_measured():
    history = history_of((8, 1.0), (8, 2.0), (9, 3.0), (9, 5.0))
    history.restart(np.array([3]))
    assert history.seconds[0, -2:].tolist() == [2.0, 4.0]
    assert history.counts[0].sum() == 3


def test_each_worker_is_restarted_for_itself():
    history = StepTimeHistory(2)
    for seconds in (1.0, 2.0):
        history.add(np.array([8.0, 8.0]), np.full(2, seconds), np.full(2, seconds))
    history.restart(np.array([0, 1]))
    assert history.seconds[:, -1].tolist() == [1.5, 2.0]


def test_a_restart_uses_times_as_measured():
    history = history_of((8, 1.0))
    history.add(np.array([8.0]), np.array([3.0]), np.array([1.1]))
    history.restart(np.array([0]))
    assert fit(history, 8).seconds < 1.1
    history.restart(np.array([1]))
    assert fit(history, 8, launch=0.9).seconds == pytest.approx([3.0], rel=0.01)


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(1e-3, 1e3)), min_size=1, max_size=9),
    st.integers(1, 1000),
)
def test_lines_rise_from_a_launch_overhead_of_at_least_zero(points, near):
    found = fit(history_of(*points), near, launch=points[0][1] / 3)
    assert found.lines.per_sample > 0
    assert found.lines.launch >= 0
    assert found.seconds > 0
    assert np.isfinite(found.error)
