"""Distinction between noise and changed conditions by the deviation of measured from expected times."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.balance.step_time_fit import RECENT

Numbers = NDArray[np.float64]

OUTLIER = 5.0
"""Limit of a residual, in standard deviations, so that a single outlier does not count as a change."""
SLACK = 0.5
"""Standard deviations subtracted in each iteration: half of the smallest change to be detected quickly."""
THRESHOLD = 8.0
"""Sum of standard deviations that counts as a change; noise alone reaches it in about 20,000 iterations."""

FIRST_NOISE, FIRST_WEIGHT, LAST_WEIGHT = 0.05, 10, 100
"""Initial relative noise, and its weight in iterations: initially and at most."""
LEAST_NOISE = 0.003
"""Lower limit of the relative noise: no curve is known more precisely."""
TRUSTED = 3.0
"""Standard deviations beyond which an iteration is not used to estimate the noise."""


class ChangeDetector:
    """Page's cumulative sums, upwards and downwards, one pair per worker."""

    def __init__(self, workers: int) -> None:
        self._sums: Numbers = np.zeros((2, workers))
        self._recent: Numbers = np.zeros((workers, RECENT))

    def observe(self, residuals: Numbers) -> NDArray[np.int64]:
        """Return by worker the number of iterations since conditions changed; 0 if unchanged.

        Parameters
        ----------
        residuals : array of shape (workers,)
            Deviations of the last iteration, in standard deviations.
        """
        counted = np.clip(residuals, -OUTLIER, OUTLIER)
        self._recent = np.column_stack([counted, self._recent[:, :-1]])
        self._sums = np.maximum(self._sums + np.stack([counted, -counted]) - SLACK, 0)
        changed = (self._sums > THRESHOLD).any(axis=0)
        new = np.where(changed, _likeliest_lengths(self._recent), 0)
        self._sums[:, changed] = 0
        self._recent[changed] = 0
        return new


def _likeliest_lengths(recent: Numbers) -> NDArray[np.int64]:
    """Return by worker the most likely number of latest residuals with a mean other than 0."""
    likelihood = np.cumsum(recent, axis=1) ** 2 / np.arange(1, RECENT + 1)
    lengths: NDArray[np.int64] = 1 + likelihood.argmax(axis=1)
    return lengths


class Noise:
    """Relative variation of each worker's time under constant conditions."""

    def __init__(self, workers: int) -> None:
        self._variance: Numbers = np.full(workers, FIRST_NOISE**2)
        self._weight = FIRST_WEIGHT

    @property
    def deviation(self) -> Numbers:
        """Relative standard deviation by worker."""
        return np.maximum(np.sqrt(self._variance), LEAST_NOISE)

    def observe(self, residuals: Numbers) -> None:
        """Update the estimate from residuals, in standard deviations."""
        self._weight = min(self._weight + 1, LAST_WEIGHT)
        surplus = np.where(np.abs(residuals) < TRUSTED, residuals**2 - 1, 0.0)
        self._variance = self._variance * (1 + surplus / self._weight)
