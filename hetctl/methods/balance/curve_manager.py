"""Batches from time curves learnt online: a few large steps to the balance, then no further changes.

Straight lines, fitted to measured times, approximate the time curves locally. `ChangeDetector` and `Noise`
tell changed conditions from noise by the deviation of measured from expected times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.balance.manager import FULL_MEMORY, BatchSizeManager, Observation
from hetctl.methods.balance.step_time import Lines, Values, whole_batches
from hetctl.model.values import dataclass

POINTS = 16
"""Points kept per worker; consecutive iterations with the same batch form one point."""
WINDOW = 128
"""Most iterations that a point averages over; older ones are forgotten."""
RECENT = 32
"""Number of latest iterations stored individually."""
LAUNCH_UNSURE = 0.3
"""Relative uncertainty of the prior launch overhead, as a share of the iteration time."""
CURVATURE = 0.1
"""Relative deviation of a curve from its line at e times the batch; it grows with the squared logarithm."""
LEAST_RISE = 0.05
"""Least rise of time in per cent for 1 % more samples, at the largest measured batch. As launching takes
time, the rise is at most 1 %."""

LAUNCH_SHARE = 0.3
"""Assumed share of launch overhead in the first iteration, until the curve shows it."""
LEAST_GAIN = 0.01
"""Least share of the iteration time that new batches have to save."""
MIN_SAVING_ERRORS = 0.5
"""Least number of standard errors of the slowest worker's time that they have to save, too."""
GROWTH_LIMITS = (1.15, 2.0, math.inf)
"""Limits of growth. A batch grows at most to the size that would take this multiple of the slowest worker's
present time if time were proportional to it. A higher limit is tried only if a lower one saves too little."""
NEGLIGIBLE = 1e-9
"""Share of memory that counts as none; also the tolerance of rounding errors in samples."""
CLIP_DEVIATIONS = 3.0
"""Standard deviations at which a measurement's deviation is clipped."""

OUTLIER = 5.0
"""Limit of a residual in standard deviations, so that a single outlier is no change."""
SLACK = 0.5
"""Standard deviations subtracted in each iteration: half the smallest change to detect quickly."""
THRESHOLD = 8.0
"""Sum of standard deviations that counts as a change; noise alone reaches it in about 20,000 iterations."""

FIRST_NOISE, FIRST_WEIGHT, LAST_WEIGHT = 0.05, 10, 100
"""Initial relative noise, and its weight in iterations: first and largest."""
LEAST_NOISE = 0.003
"""Lower limit of the relative noise: no curve is known more precisely."""
TRUSTED = 3.0
"""Standard deviations beyond which an iteration does not count for the noise."""


class CurveManager(BatchSizeManager):
    """Manager that learns each worker's Gamma_i (launch overhead, saturation, memory) and balances by it.

    Each iteration adds a point to each worker's curve. Lines fitted near the present batches give a balanced
    split. Lines fitted near that split evaluate it; it is adopted if it saves more than `LEAST_GAIN` and more
    than the measurement's uncertainty. If a worker deviates from its curve by more than noise, the curve is
    learnt anew.
    """

    def __init__(self, batches: Sequence[int], caps: Sequence[int | None] = ()) -> None:
        super().__init__(batches, caps)
        self._history = StepTimeHistory(len(batches))
        self._noise = Noise(len(batches))
        self._changes = ChangeDetector(len(batches))
        self._launch: Values = np.zeros(len(batches))

    def update(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Learn from the last iteration; return the batches, new ones if they save enough."""
        batches = np.array([seen.batch for seen in observations], dtype=float)
        seconds = np.array([seen.seconds for seen in observations])
        self._learn(batches, seconds)
        memory = np.array([seen.memory for seen in observations])
        self._decide(self._batch_limits(batches, memory))
        return self.batches

    def _learn(self, batches: Values, seconds: Values) -> None:
        if not self._history.counts.any():
            self._launch = LAUNCH_SHARE * seconds
            self._history.add(batches, seconds, seconds)
            return
        expected = self._fit(batches)
        # Slowdowns are factors: in logarithms, twice and half the time are equally far away.
        off = np.log(seconds / expected.seconds)
        # The curve's own uncertainty must not pass for a change of conditions.
        deviation = np.hypot(self._noise.deviation, expected.error)
        self._noise.observe(off / deviation)
        new = self._changes.observe(off / deviation)
        limit = CLIP_DEVIATIONS * deviation
        # A single outlier would bend the curve; after a real change `restart` uses the measured times.
        self._history.add(batches, seconds, expected.seconds * np.exp(np.clip(off, -limit, limit)))
        self._history.restart(new)
        self._launch = np.where(new > 0, self._launch * seconds / expected.seconds, self._launch)

    def _batch_limits(self, batches: Values, memory: Values) -> Values:
        """Return the limits of the batches, if memory grows in proportion, which is its fastest growth."""
        # A memory of 0 is unknown, and gives a limit that no batch reaches.
        filled = np.floor(batches * FULL_MEMORY / np.maximum(memory, NEGLIGIBLE) + NEGLIGIBLE)
        return np.minimum(self._limits, np.maximum(filled, self.batches))

    def _fit(self, near: Values) -> Fit:
        return fit_lines(self._history, near, self._noise.deviation, self._launch)

    def _decide(self, most: Values) -> None:
        now = np.array(self.batches, dtype=float)
        present = self._fit(now)
        self._launch = present.lines.launch
        slowest = int(present.seconds.argmax())
        enough = present.seconds[slowest] * (
            1 - max(LEAST_GAIN, MIN_SAVING_ERRORS * float(present.error[slowest]))
        )
        # Half the saving is enough here: lines near the present batches underestimate distant savings.
        if present.lines.seconds(self._split(present, most)).max() > (enough + present.seconds[slowest]) / 2:
            self._warn_of_late(present)
            return
        in_proportion = now * present.seconds[slowest] / present.seconds
        for growth in GROWTH_LIMITS:
            # Far beyond the batches seen so far the curve is a guess: an iteration could take very long.
            limits = np.minimum(most, np.maximum(now + 1, np.floor(growth * in_proportion)))
            there = self._fit(self._split(present, limits))
            split = self._split(there, limits)
            if there.lines.seconds(split).max() <= enough:
                self.batches = tuple(split.astype(int).tolist())
                return

    def _split(self, fit: Fit, limits: Values) -> Values:
        return whole_batches(fit.lines, sum(self.batches), limits).astype(float)

    def _warn_of_late(self, present: Fit) -> None:
        """Add a warning if a worker delays all others although its batch is a single sample."""
        slowest = int(present.seconds.argmax())
        others = np.delete(present.seconds, slowest)
        late = others.size and others.max() * (1 + LEAST_GAIN) < present.seconds[slowest]
        if self.batches[slowest] == 1 and late:
            self._warn(slowest, "is the slowest with a single sample")


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
        """Add an iteration: its measured times, and plausible times for use until a `restart`."""
        self._recent = np.concatenate(
            [self._recent[:, :, 1:], np.stack([batches, seconds])[:, :, None]], axis=2
        )
        self._add_points(np.arange(len(batches)), batches, plausible)

    def restart(self, lengths: NDArray[np.int64]) -> None:
        """Keep, as measured, only the last `lengths` iterations of each worker, or all if its length is 0."""
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
    """Fit a line per worker; as curves are not straight, points far from `near` weigh less.

    Least squares of relative errors, with one more point: `launch` at batch 0 with uncertainty
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
    bend = CURVATURE * np.log(history.batches / near[:, None]) ** 2
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
    # The upper limit keeps the launch overhead from falling below 0.
    rise = np.clip(rise, LEAST_RISE * level / largest, level / middle)
    expected = level + rise * (near - middle)
    error = np.sqrt(1 / total + (near - middle) ** 2 / width) / expected
    return Fit(Lines(np.maximum(level - rise * middle, 0.0), rise), expected, error)


class ChangeDetector:
    """Page's cumulative sums, upwards and downwards, one pair per worker."""

    def __init__(self, workers: int) -> None:
        self._sums: Values = np.zeros((2, workers))
        self._recent: Values = np.zeros((workers, RECENT))

    def observe(self, residuals: Values) -> NDArray[np.int64]:
        """Return, by worker, the number of iterations since conditions changed; 0 if unchanged.

        Parameters
        ----------
        residuals : array of shape (workers,)
            Deviations of the last iteration, in standard deviations.
        """
        # Below THRESHOLD: one odd iteration alone is no change.
        counted = np.clip(residuals, -OUTLIER, OUTLIER)
        self._recent = np.column_stack([counted, self._recent[:, :-1]])
        self._sums = np.maximum(self._sums + np.stack([counted, -counted]) - SLACK, 0)
        changed = (self._sums > THRESHOLD).any(axis=0)
        new = np.where(changed, _likeliest_lengths(self._recent), 0)
        self._sums[:, changed] = 0
        self._recent[changed] = 0
        return new


def _likeliest_lengths(recent: Values) -> NDArray[np.int64]:
    """Return, by worker, the most likely number of latest residuals with a mean other than 0."""
    # Twice the log-likelihood ratio of a shifted mean over the last k residuals of variance 1.
    likelihood = np.cumsum(recent, axis=1) ** 2 / np.arange(1, RECENT + 1)
    lengths: NDArray[np.int64] = 1 + likelihood.argmax(axis=1)
    return lengths


class Noise:
    """Relative variation of each worker's time under constant conditions."""

    def __init__(self, workers: int) -> None:
        self._variance: Values = np.full(workers, FIRST_NOISE**2)
        self._weight = FIRST_WEIGHT

    @property
    def deviation(self) -> Values:
        """Relative standard deviation by worker."""
        return np.maximum(np.sqrt(self._variance), LEAST_NOISE)

    def observe(self, residuals: Values) -> None:
        """Update the estimate from residuals, in standard deviations."""
        self._weight = min(self._weight + 1, LAST_WEIGHT)
        surplus = np.where(np.abs(residuals) < TRUSTED, residuals**2 - 1, 0.0)
        self._variance = self._variance * (1 + surplus / self._weight)
