"""Noise told from a change of conditions, by how far measured seconds are off what was expected."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.balance.step_time_fit import RECENT

Numbers = NDArray[np.float64]

OUTLIER = 5.0
"""Nothing counts for more than so many standard deviations: one odd iteration is no change."""
SLACK = 0.5
"""Standard deviations that are taken off each time; half of the least change to be noticed soon."""
THRESHOLD = 8.0
"""Standard deviations, summed up, that make a change; mere noise takes about 20,000 iterations to them."""

FIRST_NOISE, FIRST_WEIGHT, LAST_WEIGHT = 0.05, 10, 100
"""Relative noise to begin with, and how many iterations that counts for, then and at most."""
LEAST_NOISE = 0.003
"""Relative noise that is reckoned with in any case: no curve is known better."""
TRUSTED = 3.0
"""Standard deviations beyond which an iteration says nothing about the noise."""


class ChangeDetector:
    """Page's cumulative sums, upwards and downwards, one pair by worker."""

    def __init__(self, workers: int) -> None:
        self._sums: Numbers = np.zeros((2, workers))
        self._recent: Numbers = np.zeros((workers, RECENT))

    def observe(self, residuals: Numbers) -> NDArray[np.int64]:
        """Return by worker for how many iterations conditions have been new; 0 where they are as they were.

        Parameters
        ----------
        residuals : array of shape (workers,)
            In standard deviations.
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
    """Return by worker how many of its residuals, the latest first, likeliest have a mean of their own."""
    likelihood = np.cumsum(recent, axis=1) ** 2 / np.arange(1, RECENT + 1)
    lengths: NDArray[np.int64] = 1 + likelihood.argmax(axis=1)
    return lengths


class Noise:
    """How much the seconds of each worker vary while conditions stay the same, relatively."""

    def __init__(self, workers: int) -> None:
        self._variance: Numbers = np.full(workers, FIRST_NOISE**2)
        self._weight = FIRST_WEIGHT

    @property
    def deviation(self) -> Numbers:
        """Standard deviation by worker."""
        return np.maximum(np.sqrt(self._variance), LEAST_NOISE)

    def observe(self, residuals: Numbers) -> None:
        """Learn from residuals, in standard deviations."""
        self._weight = min(self._weight + 1, LAST_WEIGHT)
        surplus = np.where(np.abs(residuals) < TRUSTED, residuals**2 - 1, 0.0)
        self._variance = self._variance * (1 + surplus / self._weight)
