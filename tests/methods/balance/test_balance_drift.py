import numpy as np
import pytest

from hetctl.methods.balance.drift import ChangeDetector, Noise


def observe(detector, *residuals):
    return [int(detector.observe(np.array([residual]))[0]) for residual in residuals]


def test_noise_is_no_change():
    detector = ChangeDetector(8)
    draw = np.random.default_rng(1)
    assert sum(np.count_nonzero(detector.observe(draw.normal(size=8))) for _ in range(500)) == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_a_large_change_is_noticed_in_the_second_iteration(sign):
    assert observe(ChangeDetector(1), 0.1, sign * 30.0, sign * 30.0) == [0, 0, 2]


def test_a_single_odd_iteration_is_no_change():
    assert observe(ChangeDetector(1), 0.0, 100.0, 0.0, 0.0, 0.0) == [0] * 5


def test_a_small_change_is_noticed_when_it_lasts():
    seen = observe(ChangeDetector(1), *[1.5] * 9)
    assert seen == [0] * 8 + [9]


def test_the_next_change_is_counted_from_anew():
    detector = ChangeDetector(1)
    assert observe(detector, 9.0, 9.0, 9.0, 9.0) == [0, 2, 0, 2]


def test_each_worker_changes_for_itself():
    detector = ChangeDetector(2)
    detector.observe(np.array([0.0, 9.0]))
    assert detector.observe(np.array([0.0, 9.0])).tolist() == [0, 2]


@pytest.mark.parametrize("true", [0.01, 0.03, 0.1])
def test_noise_is_learnt(true):
    noise, draw = Noise(4), np.random.default_rng(2)
    for _ in range(400):
        noise.observe(draw.normal(scale=true, size=4) / noise.deviation)
    assert noise.deviation == pytest.approx(np.full(4, true), rel=0.3)
