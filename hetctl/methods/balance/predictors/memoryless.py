"""Prediction of the speed of the last iteration (LB-BSP, section 3.2.2)."""

from __future__ import annotations

import numpy as np

from hetctl.methods.balance.predictors.base import Values, check


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
