"""When workers with equal batches count as drifted apart."""

from __future__ import annotations

import numpy as np
import pytest

from hetctl.methods.balance.manager import LASTING, WINDOW, DriftDetector


def noticed_at(factors, noise, iterations, seed=0):
    """Return the number of iterations after which the detector answers; None if it does not."""
    draw = np.random.default_rng(seed)
    times = np.array(factors) * np.exp(draw.normal(0.0, noise, (iterations, len(factors))))
    detector = DriftDetector(len(factors))
    return next((i for i, own in enumerate(times.tolist(), 1) if detector.observe(own)), None)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_a_worker_15_percent_slower_is_noticed(noise):
    assert noticed_at([1, 1, 1.15, 1], noise, 400) == WINDOW * LASTING


@pytest.mark.parametrize("factors", [[1.0] * 8, [1.0, 1.05, 1.08, 1.0]])
def test_noise_around_nearly_equal_speeds_is_not_noticed(factors):
    assert noticed_at(factors, 0.05 if len(set(factors)) == 1 else 0.01, 20_000) is None


def test_single_outliers_and_common_slowdowns_are_not_noticed():
    detector = DriftDetector(2)
    for number in range(2_000):
        common = 3.0 if number > 1_000 else 1.0
        outlier = 20.0 if number % 5 == 0 else 1.0
        assert not detector.observe([common * outlier, common])


def test_a_worker_that_slows_down_later_is_noticed():
    detector = DriftDetector(2)
    assert not any(detector.observe([0.1, 0.1]) for _ in range(1_000))
    assert any(detector.observe([0.3, 0.1]) for _ in range(WINDOW * (LASTING + 1)))
