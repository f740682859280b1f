"""ARIMA of order (2, 2, 1), fitted anew with every observation (LB-BSP, section 5.4)."""

from __future__ import annotations

import numpy as np

from hetctl.methods.balance.predictors.learner import ObservedRange
from hetctl.methods.balance.step_time import Values

INVERTIBLE = 0.99
"""Largest magnitude of the moving-average coefficient; below 1, the influence of past errors decays."""


class Arima:
    """ARIMA model w_t = a w_{t-1} + b w_{t-2} + c e_{t-1} + e_t of the second difference w of the speed.

    The coefficients are estimated by the recursive prediction error method (Ljung and Söderström, 1983,
    chapter 3): one Gauss-Newton step per observation towards the least sum of squared errors, with a prior
    of mean 0 and standard deviation about 1.

    Attributes
    ----------
    coefficients : array, shape (workers, 3)
        The coefficients a, b and c.
    """

    def __init__(self, workers: int) -> None:
        self._range = ObservedRange(workers)
        self._speeds: list[Values] = []
        self._inputs = np.zeros((workers, 3))
        self._slopes = np.zeros((workers, 3))
        self._spread = np.tile(np.eye(3), (workers, 1, 1))
        self._squares = np.zeros(workers)
        self._errors = 0
        self.coefficients = np.zeros((workers, 3))

    def observe(self, speed: Values, _cpu: Values, _memory: Values) -> None:
        """Update the coefficients from the error of the last prediction."""
        self._range.observe(speed)
        self._speeds = [*self._speeds[-2:], speed.copy()]
        if len(self._speeds) == 3:
            self._learn(speed - 2 * self._speeds[1] + self._speeds[0])

    def predict(self) -> Values:
        """Return the speed with the least expected squared error under the present coefficients."""
        if not self._speeds:
            return np.ones(len(self._squares))
        before, last = (self._speeds[:1] + self._speeds)[-2:]
        return self._range.clip(2 * last - before + self._difference())

    def _difference(self) -> Values:
        """Return the expected next w."""
        difference: Values = (self.coefficients * self._inputs).sum(axis=1)
        return difference

    def _learn(self, difference: Values) -> None:
        """Update the coefficients and inputs with w_t.

        Before the update, `_inputs` are w_{t-1}, w_{t-2} and e_{t-1}. `_slopes` become the derivatives of
        the prediction by the coefficients, including those through earlier errors.
        """
        error = difference - self._difference()
        self._squares += error**2
        self._errors += 1
        self._slopes = self._inputs - self.coefficients[:, 2:] * self._slopes
        reach = np.einsum("wij,wj->wi", self._spread, self._slopes)
        variance = self._squares / self._errors + (self._slopes * reach).sum(axis=1)
        gain = reach / np.where(variance > 0, variance, 1.0)[:, None]
        self._spread -= gain[:, :, None] * reach[:, None, :]
        self.coefficients += gain * error[:, None]
        np.clip(self.coefficients[:, 2], -INVERTIBLE, INVERTIBLE, out=self.coefficients[:, 2])
        left = difference - self._difference()
        self._inputs = np.stack([difference, self._inputs[:, 0], left], axis=1)
