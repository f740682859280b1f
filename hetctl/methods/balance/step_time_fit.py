"""Straight lines fitted to measured times: local approximations of the time curves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.balance.batch_partition import Lines, Values

POINTS = 16
"""Points kept per worker; consecutive iterations with the same batch form one point."""
WINDOW = 128
"""Most iterations that a point averages over; beyond that, older ones are forgotten."""
RECENT = 32
"""Latest iterations that are stored individually."""
LAUNCH_UNSURE = 0.3
"""Relative uncertainty of the prior launch overhead, as a share of the iteration time."""
BEND = 0.1
"""Relative deviation of a curve from its line at e times the batch; grows with the squared logarithm."""
LEAST_RISE = 0.05
"""Least rise of time in per cent for 1 % more samples, at the largest batch measured. The rise is at most
1 %, since launching takes time."""


class StepTimeHistory:
    """Points of all workers' time curves, arrays of shape (workers, POINTS), the latest point last.

    Parameters
    ----------
    workers : int
        Number of workers.
    """

    def __init__(self, workers: int) -> None:
        self.batches: Values = np.ones((workers, POINTS))
        self.seconds: Values = np.ones((workers, POINTS))
        self.counts: Values = np.zeros((workers, POINTS))
        self._recent: Values = np.ones((2, workers, RECENT))

    def add(self, batches: Values, seconds: Values, plausible: Values) -> None:
        """Add an iteration: as measured, and the plausible times to use for the time being."""
        self._recent = np.concatenate(
            [self._recent[:, :, 1:], np.stack([batches, seconds])[:, :, None]], axis=2
        )
        self._add_points(np.arange(len(batches)), batches, plausible)

    def restart(self, lengths: NDArray[np.int64]) -> None:
        """Keep only the last `lengths` iterations, as measured, of each worker for which it is above 0."""
        for worker in np.flatnonzero(lengths):
            self.counts[worker] = 0
            for batch, seconds in self._recent[:, worker, -lengths[worker] :].T:
                self._add_points(np.array([worker]), batch, seconds)

    def _add_points(self, workers: NDArray[np.int64], batches: Values, seconds: Values) -> None:
        last = self.counts[workers, -1] > 0
        moved = workers[last & (self.batches[workers, -1] != batches)]
        for points in (self.batches, self.seconds, self.counts):
            points[moved, :-1] = points[moved, 1:]
        self.counts[moved, -1] = 0
        self.batches[workers, -1] = batches
        counts = np.minimum(self.counts[workers, -1] + 1, WINDOW)
        self.counts[workers, -1] = counts
        self.seconds[workers, -1] += (seconds - self.seconds[workers, -1]) / counts


@dataclass(frozen=True)
class Fit:
    """Lines that approximate the time curves near given batches.

    Parameters
    ----------
    seconds : array of shape (workers,)
        Times at those batches.
    error : array of shape (workers,)
        Relative standard error of these times.
    """

    lines: Lines
    seconds: Values
    error: Values


def fit_lines(history: StepTimeHistory, near: Values, noise: Values, launch: Values) -> Fit:
    """Fit a line per worker; points with batches far from `near` weigh less, as curves are not straight.

    Least squares of relative errors, with one additional point: `launch` at batch 0, with uncertainty
    `LAUNCH_UNSURE`.

    Parameters
    ----------
    near : array of shape (workers,)
        Batches near which the lines approximate the curves.
    noise : array of shape (workers,)
        Relative standard deviation of measured times.
    launch : array of shape (workers,)
        Prior launch overhead in seconds.
    """
    bend = BEND * np.log(history.batches / near[:, None]) ** 2
    weight = history.counts / (noise[:, None] ** 2 + history.counts * bend**2) / history.seconds**2
    by_batch, total = weight * history.batches, weight.sum(axis=1)
    middle = by_batch.sum(axis=1)
    width = np.einsum("ij,ij->i", by_batch, history.batches)
    level = np.einsum("ij,ij->i", weight, history.seconds)
    at_zero = (LAUNCH_UNSURE * level / total) ** -2
    total = total + at_zero
    middle, level = middle / total, (level + at_zero * launch) / total
    width -= total * middle**2
    rise = (np.einsum("ij,ij->i", by_batch, history.seconds) - total * middle * level) / width
    largest = np.maximum((history.batches * (history.counts > 0)).max(axis=1), middle)
    # The upper limit keeps the launch overhead from being negative.
    rise = np.clip(rise, LEAST_RISE * level / largest, level / middle)
    expected = level + rise * (near - middle)
    error = np.sqrt(1 / total + (near - middle) ** 2 / width) / expected
    return Fit(Lines(np.maximum(level - rise * middle, 0.0), rise), expected, error)
