"""The last observations of every worker, and what is usual among all that there were."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.balance.predictors.base import Values

Numbers = NDArray[np.int64]

SERIES = SPEED, CPU, MEMORY = range(3)
"""Speed stands for its logarithm: what slows a worker down does so by a factor."""
REMEMBERED = 1024
"""Observations that are kept at least; twice as many at most."""
FLAT = 1e-6
"""A series that varies by less than this share of its mean is taken to be constant."""


class SpeedHistory:
    """Series of observations, of which those long past are forgotten.

    Attributes
    ----------
    seen : int
        How many observations there were, the forgotten ones too.
    """

    def __init__(self, workers: int) -> None:
        self._values = np.zeros((workers, len(SERIES), 2 * REMEMBERED))
        self._length = 0
        self._sums = np.zeros((2, workers, len(SERIES)))
        self.seen = 0

    def __len__(self) -> int:
        return self._length

    def append(self, speed: Values, cpu: Values, memory: Values) -> None:
        """Add an observation; each array has the shape (workers,)."""
        if self._length == self._values.shape[2]:
            self._values[..., :REMEMBERED] = self._values[..., REMEMBERED:]
            self._length = REMEMBERED
        newest = np.stack([speed, cpu, memory], axis=1)
        self._values[..., self._length] = newest
        self._sums += np.stack([newest, newest**2])
        self._length += 1
        self.seen += 1

    def at(self, workers: Numbers, series: Numbers, rows: Numbers) -> Values:
        """Return single values; the arrays are broadcast together, and rows count from the oldest kept."""
        return self._values[workers, series, rows]

    def usual(self) -> tuple[Values, Values]:
        """Return means and standard deviations, of the shape (workers, series).

        Means of speed are each worker's own. All else is the same for all workers, so that what one of
        them met tells something about the others.
        """
        mean, square = self._sums / self.seen
        centres = np.broadcast_to(mean.mean(axis=0), mean.shape).copy()
        centres[:, SPEED] = mean[:, SPEED]
        variance = (square - 2 * centres * mean + centres**2).mean(axis=0)
        spread = np.sqrt(np.maximum(variance, 0.0))
        spread = np.where(spread > FLAT * np.abs(centres).max(axis=0), spread, 1.0)
        return centres, np.broadcast_to(spread, mean.shape)
