"""Last speed, and exponential moving average of the speed (LB-BSP, section 3.2.2)."""

from __future__ import annotations

import numpy as np

from hetctl.methods.balance.predictors.base import Values, check

ALPHA = 0.2
"""Weight of the latest observation (LB-BSP, Table 3)."""


class Memoryless:
    """Predictor of an unchanged speed."""

    def __init__(self, workers: int) -> None:
        self._speed = np.ones(workers)

    def observe(self, speed: Values, cpu: Values, memory: Values) -> None:
        """Store the last speed."""
        check(len(self._speed), speed, cpu, memory)
        self._speed = speed.copy()

    def predict(self) -> Values:
        """Return the last speed."""
        return self._speed.copy()


class Ema:
    """Predictor of the moving average; the first observation has full weight."""

    def __init__(self, workers: int) -> None:
        self._average = np.ones(workers)
        self._started = False

    def observe(self, speed: Values, cpu: Values, memory: Values) -> None:
        """Update the average with the last speed."""
        check(len(self._average), speed, cpu, memory)
        weight = ALPHA if self._started else 1.0
        self._average += weight * (speed - self._average)
        self._started = True

    def predict(self) -> Values:
        """Return the average."""
        return self._average.copy()
