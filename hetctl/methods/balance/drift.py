"""Detection of ranks that drift apart, upon which balancing begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

LIMIT = 1.10
"""Ratio of the slowest to the fastest worker's time beyond which balancing begins."""
WINDOW = 16
"""Number of iterations compared by their medians, which resist single outliers."""
LASTING = 3
"""Successive windows in which the same worker has to exceed the limit."""
SURE = 3.0
"""Least distance of the worker as well, in standard errors of the difference of two medians."""
DEVIATIONS_PER_MAD = 1.4826
"""Standard deviations in a median absolute deviation, for normal noise."""
ERROR_OF_DIFFERENCE = math.sqrt(math.pi / 2 * 2 / WINDOW)
"""Standard error of the difference of two medians of a window, in standard deviations of a time."""


class DriftDetector:
    """Comparison of the times of workers with equal batches, once per `WINDOW` of iterations.

    A common slowdown of all workers does not count. Nor does noise: eight equal workers with times that vary
    by 10 % pass for unequal ones twice in a million iterations.

    Parameters
    ----------
    workers : int
        Number of workers.
    """

    def __init__(self, workers: int) -> None:
        self._workers = range(workers)
        self._window: list[list[float]] = []
        self._slow: list[set[int]] = []

    def observe(self, seconds: Sequence[float]) -> bool:
        """Add the times of an iteration; return true if the workers have drifted apart.

        Parameters
        ----------
        seconds : sequence of float
            Computation time by worker, without waiting for others.
        """
        # Slowdowns are factors; their logarithms are differences.
        self._window.append([math.log(own) for own in seconds])
        if len(self._window) < WINDOW:
            return False
        self._slow = [*self._slow, self._slow_workers()][-LASTING:]
        self._window.clear()
        return len(self._slow) == LASTING and bool(set.intersection(*self._slow))

    def _slow_workers(self) -> set[int]:
        """Return the workers whose time in this window exceeds the fastest worker's by the limit."""
        medians = [median(iteration[worker] for iteration in self._window) for worker in self._workers]
        residuals = (abs(own - medians[w]) for iteration in self._window for w, own in enumerate(iteration))
        noise = DEVIATIONS_PER_MAD * median(residuals)
        limit = min(medians) + max(math.log(LIMIT), SURE * ERROR_OF_DIFFERENCE * noise)
        return {worker for worker, own in enumerate(medians) if own > limit}
