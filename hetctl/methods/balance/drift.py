"""Detection of ranks that drift apart: when balancing switches itself on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

LIMIT = 1.10
"""Ratio of the slowest worker's time to the fastest one's beyond which their batches are balanced."""
WINDOW = 16
"""Iterations that are compared: their medians are not affected by single outliers."""
LASTING = 3
"""Windows in succession in which the same worker has to be beyond the limit."""
SURE = 3.0
"""Standard errors of the difference of two medians that a worker has to be apart as well."""
DEVIATIONS_PER_MAD = 1.4826
"""Standard deviations in a median absolute deviation, for normal noise."""
ERROR_OF_DIFFERENCE = math.sqrt(math.pi / 2 * 2 / WINDOW)
"""Standard error of the difference of two medians of a window, in standard deviations of a time."""


class DriftDetector:
    """Comparison of the times of workers with equal batches, once in each `WINDOW` of iterations.

    A slowdown common to all workers does not count. Nor does noise: eight equal workers whose times vary by
    10 % are taken for unequal ones twice in a million iterations.

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
        # Slowdowns are factors: in the logarithm they are differences.
        self._window.append([math.log(own) for own in seconds])
        if len(self._window) < WINDOW:
            return False
        self._slow = [*self._slow, self._slow_workers()][-LASTING:]
        self._window.clear()
        return len(self._slow) == LASTING and bool(set.intersection(*self._slow))

    def _slow_workers(self) -> set[int]:
        """Return the workers that are slower in this window than the fastest one by more than the limit."""
        medians = [median(iteration[worker] for iteration in self._window) for worker in self._workers]
        residuals = (abs(own - medians[w]) for iteration in self._window for w, own in enumerate(iteration))
        noise = DEVIATIONS_PER_MAD * median(residuals)
        limit = min(medians) + max(math.log(LIMIT), SURE * ERROR_OF_DIFFERENCE * noise)
        return {worker for worker, own in enumerate(medians) if own > limit}
