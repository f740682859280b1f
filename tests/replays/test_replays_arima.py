"""The ARIMA model of LB-BSP's Table 3."""

import numpy as np
import pytest
from replays.arima import Arima
from scipy.optimize import least_squares
from scipy.signal import lfilter


def fed(speeds):
    """Return a model that has seen a worker's speeds."""
    model = Arima(1)
    for speed in speeds:
        model.observe(speed, np.ones(1), np.zeros(1))
    return model


def arma(coefficients, errors):
    """Return the ARMA(2, 1) series that these errors drive."""
    a, b, c = coefficients
    return lfilter([1, c], [1, -a, -b], errors)


@pytest.mark.parametrize("truth", [(0.5, -0.3, 0.6), (-0.5, -0.3, 0.4), (0.2, 0.1, -0.9)])
def test_arima_finds_the_coefficients_of_least_squares(truth):
    difference = arma(truth, np.random.default_rng(0).normal(0.0, 0.01, 2000))

    def errors(coefficients):
        a, b, c = coefficients
        return lfilter([1, -a, -b], [1, c], difference)

    fit = least_squares(errors, np.zeros(3), x_scale=0.1).x
    found = fed(1e5 + np.cumsum(np.cumsum(difference))[:, None]).coefficients[0]
    assert found == pytest.approx(fit, abs=0.05)


def test_arima_follows_a_line_within_the_range_seen():
    line = np.arange(1.0, 30.0)[:, None]
    down = fed(np.concatenate([line, line[::-1][1:-5]]))
    assert down.predict() == pytest.approx([5.0], abs=0.2)
    assert fed(line).predict() == pytest.approx([29.0])
