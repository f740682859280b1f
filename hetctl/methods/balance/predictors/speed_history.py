"""History of every worker's observations, with means and deviations of all observations so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.balance.predictors.base import Values

Indices = NDArray[np.int64]

SERIES = SPEED, CPU, MEMORY = range(3)
"""Indices of the series; speed is stored as its logarithm, since slowdowns are multiplicative."""
REMEMBERED = 1024
"""Least number of observations kept; at most twice as many are."""
FLAT = 1e-6
"""Share of its mean below which the variation of a series counts as none."""


class SpeedHistory:
    """Series of observations, of which the oldest are dropped.

    Attributes
    ----------
    seen : int
        Number of observations so far, the dropped ones included.
    """

    def __init__(self, workers: int) -> None:
        self._values = np.zeros((workers, len(SERIES), 2 * REMEMBERED))
        self._length = 0
        self._sums = np.zeros((2, workers, len(SERIES)))
        self.seen = 0

    def append(self, speed: Values, cpu: Values, memory: Values) -> None:
        """Add an observation; each array has shape (workers,)."""
        if self._length == self._values.shape[2]:
            self._values[..., :REMEMBERED] = self._values[..., REMEMBERED:]
            self._length = REMEMBERED
        newest = np.stack([speed, cpu, memory], axis=1)
        self._values[..., self._length] = newest
        self._sums += np.stack([newest, newest**2])
        self._length += 1
        self.seen += 1

    @property
    def kept(self) -> Values:
        """Values kept, the oldest first, shape (workers, series, observations); a view that changes."""
        return self._values[..., : self._length]

    def usual(self) -> tuple[Values, Values]:
        """Return means and standard deviations, shape (workers, series).

        Means of the speed are per worker. All else is common to all workers, so that a network can use the
        conditions that other workers have had.
        """
        mean, square = self._sums / self.seen
        centres = np.broadcast_to(mean.mean(axis=0), mean.shape).copy()
        centres[:, SPEED] = mean[:, SPEED]
        variance = (square - 2 * centres * mean + centres**2).mean(axis=0)
        # A difference of squares may be negative by rounding.
        spread = np.sqrt(np.maximum(variance, 0.0))
        spread = np.where(spread > FLAT * np.abs(centres).max(axis=0), spread, 1.0)
        return centres, np.broadcast_to(spread, mean.shape)
