"""Interface of predictors of speed, and two without networks: last speed, moving average (section 3.2.2)."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hetctl.methods.balance.step_time import Values


class Predictor(Protocol):
    """Predictor of each worker's speed in the next iteration.

    Between two iterations, `observe` is called first and `predict` second.
    """

    def observe(self, speed: Values, cpu: Values, memory: Values) -> None:
        """Add the observations before iteration k, arrays of shape (workers,).

        Parameters
        ----------
        speed : array
            Speed in the last iteration, v^{k-1}, in samples/s, above 0.
        cpu, memory : array
            Present values c^k and m^k, in a unit common to all workers; all equal if not measured.
        """

    def predict(self) -> Values:
        """Return v^k in samples/s, above 0, shape (workers,).

        Predictions stay within the range of the worker's past speeds. Before the first observation they are
        1.
        """


class ObservedRange:
    """Range of each worker's values so far."""

    def __init__(self, workers: int) -> None:
        self.lowest = np.full(workers, np.inf)
        self.highest = np.full(workers, -np.inf)

    def observe(self, values: Values) -> None:
        """Extend the range to these values."""
        np.minimum(self.lowest, values, out=self.lowest)
        np.maximum(self.highest, values, out=self.highest)

    def clip(self, values: Values) -> Values:
        """Return the values clipped to the range; NaN becomes the lowest."""
        # Unlike minimum and maximum, fmin and fmax return the other operand for NaN.
        return np.fmin(np.fmax(values, self.lowest), self.highest)


ALPHA = 0.2
"""Weight of the latest observation (LB-BSP, Table 3)."""


class Memoryless:
    """Predictor of an unchanged speed."""

    def __init__(self, workers: int) -> None:
        self._speed = np.ones(workers)

    def observe(self, speed: Values, _cpu: Values, _memory: Values) -> None:
        """Store the last speed."""
        self._speed = speed.copy()

    def predict(self) -> Values:
        """Return the last speed."""
        return self._speed.copy()


class Ema:
    """Predictor of the moving average; the first observation has full weight."""

    def __init__(self, workers: int) -> None:
        self._average = np.ones(workers)
        self._started = False

    def observe(self, speed: Values, _cpu: Values, _memory: Values) -> None:
        """Update the average with the last speed."""
        weight = ALPHA if self._started else 1.0
        self._average += weight * (speed - self._average)
        self._started = True

    def predict(self) -> Values:
        """Return the average."""
        return self._average.copy()
