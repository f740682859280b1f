"""From timed training steps to a rate: robust, and with no more steps than it takes to know it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

WANTED_ERROR = 0.03
"""A rate is known when the half-width of its confidence interval is at most this share of it."""
LEAST_RUNS = 6
LEAST_S = 0.6
"""Steps are timed for at least so long: what disturbs them comes and goes more slowly than fast steps do."""
MOST_S = 4.0
"""However much they vary, they are timed for no longer than this, or `LEAST_RUNS`."""
WARM_UP_SHARE = 0.25
"""Share of the runs, from the first on, that do not count: caches, clocks and allocators warm up."""
BATCH_MEANS = 10
"""Neighbouring runs are alike, so the error is that of the means of so many groups of neighbours."""
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles of 95 % confidence for 2 to `BATCH_MEANS` groups; SciPy would cost every rank its import."""
OUTLIER_SPREADS, OUTLIER_SHARE = 5.0, 0.5
"""An outlier is above the median by so many robust standard deviations, and by this share of it."""


@dataclass(frozen=True)
class StepTimes:
    """Step time in steady state, from timed runs of steps.

    Parameters
    ----------
    mean_s : float
        Of a step in steady state, outliers left out.
    error : float
        Half-width of the 95 % confidence interval of `mean_s`, as a share of it.
    spread : float
        Robust standard deviation of the runs' seconds per step, as a share of `mean_s`.
    outliers : tuple of float
        Seconds per step of the runs that were left out as too slow.
    """

    mean_s: float
    error: float
    spread: float
    outliers: tuple[float, ...] = ()


def step_times(runs: Sequence[float]) -> StepTimes:
    """Return the step time in steady state, the warm-up left out.

    Parameters
    ----------
    runs : sequence of float
        Mean seconds of a step in each run of one or more steps; at least one run.
    """
    steady = runs[min(math.ceil(WARM_UP_SHARE * len(runs)), len(runs) - 1) :]
    median = statistics.median(steady)
    deviation = 1.4826 * statistics.median(abs(seconds - median) for seconds in steady)
    limit = median + max(OUTLIER_SPREADS * deviation, OUTLIER_SHARE * median)
    counted = [seconds for seconds in steady if seconds <= limit]
    mean = statistics.fmean(counted)
    return StepTimes(
        mean_s=mean,
        error=_half_width(counted) / mean,
        spread=deviation / mean,
        outliers=tuple(seconds for seconds in steady if seconds > limit),
    )


def is_known(runs: Sequence[float], timed_s: float) -> bool:
    """Return true once the rate is known within `WANTED_ERROR`, or as well as it may be in `MOST_S`.

    Parameters
    ----------
    timed_s : float
        Seconds that all runs took together.
    """
    if len(runs) < LEAST_RUNS or timed_s < LEAST_S:
        return False
    return timed_s >= MOST_S or step_times(runs).error <= WANTED_ERROR


def _half_width(seconds: Sequence[float]) -> float:
    """Return the half-width of the confidence interval of the mean, by batch means."""
    groups = min(BATCH_MEANS, len(seconds))
    if groups < 2:
        return math.inf
    ends = [group * len(seconds) // groups for group in range(groups + 1)]
    means = [statistics.fmean(seconds[start:end]) for start, end in pairwise(ends)]
    return STUDENT_T[groups - 2] * statistics.stdev(means) / math.sqrt(groups)
