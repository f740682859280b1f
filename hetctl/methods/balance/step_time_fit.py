"""Straight lines through what was measured: time curves near the batches at which they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.balance.batch_partition import Lines, Numbers

POINTS = 16
"""Of each worker that are remembered: iterations in a row with the same batch are one."""
WINDOW = 128
"""Iterations that a point stands for at most; then it forgets."""
RECENT = 32
"""Iterations that are remembered one by one."""
LAUNCH_UNSURE = 0.3
"""Share of an iteration by which the launch overhead may differ from what it was taken for."""
BEND = 0.1
"""How far a curve strays from its line at e times the batch, relatively; with the logarithm's square."""
LEAST_RISE = 0.05
"""Per cent by which time rises with 1 % more samples, at the largest batch measured, at least; at most it is
1, as launching takes time."""


class StepTimeHistory:
    """Points of all workers' time curves, arrays of shape (workers, POINTS), the latest last.

    Parameters
    ----------
    workers : int
    """

    def __init__(self, workers: int) -> None:
        self.batches: Numbers = np.ones((workers, POINTS))
        self.seconds: Numbers = np.ones((workers, POINTS))
        self.counts: Numbers = np.zeros((workers, POINTS))
        self._recent: Numbers = np.ones((2, workers, RECENT))

    def add(self, batches: Numbers, seconds: Numbers, believed: Numbers) -> None:
        """Remember one more iteration, as measured and as far as that is believed, for now."""
        self._recent = np.concatenate(
            [self._recent[:, :, 1:], np.stack([batches, seconds])[:, :, None]], axis=2
        )
        self._take(np.arange(len(batches)), batches, believed)

    def restart(self, lengths: NDArray[np.int64]) -> None:
        """Keep only so many last iterations, and believe them, of each worker where that is above 0."""
        for worker in np.flatnonzero(lengths):
            self.counts[worker] = 0
            for batch, seconds in self._recent[:, worker, -lengths[worker] :].T:
                self._take(np.array([worker]), batch, seconds)

    def _take(self, workers: NDArray[np.int64], batches: Numbers, seconds: Numbers) -> None:
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
    """Lines that are good near certain batches.

    Parameters
    ----------
    seconds : array of shape (workers,)
        At those batches.
    error : array of shape (workers,)
        Standard error of these seconds, relative.
    """

    lines: Lines
    seconds: Numbers
    error: Numbers


def fit_lines(history: StepTimeHistory, near: Numbers, noise: Numbers, launch: Numbers) -> Fit:
    """Fit a line by worker; points with batches far from `near` count less, as curves are bent.

    Least squares of relative errors, with one point more: `launch` at batch 0, known to
    `LAUNCH_UNSURE`.

    Parameters
    ----------
    near : array of shape (workers,)
        Batches where the lines are to be good.
    noise : array of shape (workers,)
        Standard deviation of measured seconds, relative.
    launch : array of shape (workers,)
        Seconds of launching, as far as they were known before.
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
    rise = np.clip(rise, LEAST_RISE * level / largest, level / middle)
    expected = level + rise * (near - middle)
    error = np.sqrt(1 / total + (near - middle) ** 2 / width) / expected
    return Fit(Lines(np.maximum(level - rise * middle, 0.0), rise), expected, error)
