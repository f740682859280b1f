"""Rate from timed training steps: robust, with no more steps than its precision requires."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

WANTED_ERROR = 0.03
"""Largest half-width of the confidence interval of a rate that is accurate enough, relative to the rate."""
LEAST_RUNS = 6
LEAST_S = 0.6
"""Least time in seconds for which steps are timed: disturbances change more slowly than fast steps."""
MOST_S = 4.0
"""Time in seconds after which timing ends even if the steps vary, once there are `LEAST_RUNS` runs."""
WARM_UP_SHARE = 0.25
"""Share of the runs, from the first on, that is discarded: caches, clocks and allocators warm up."""
BATCH_MEANS = 10
"""Number of groups for batch means; neighbouring runs are correlated, so the error is that of group means."""
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles of 95 % confidence for 2 to `BATCH_MEANS` groups; importing SciPy would delay every rank."""
OUTLIER_SPREADS, OUTLIER_SHARE = 5.0, 0.5
"""Least distance of an outlier above the median, in robust standard deviations and relative to the median."""


@dataclass(frozen=True)
class StepTimes:
    """Step time in steady state, from timed runs of steps.

    Parameters
    ----------
    mean_s : float
        Mean seconds of a step in steady state, without outliers.
    error : float
        Half-width of the 95 % confidence interval of `mean_s`, relative to it.
    spread : float
        Robust standard deviation of the runs' seconds per step, relative to `mean_s`.
    slow_steps_s : tuple of float
        Seconds per step of the runs that were discarded as too slow.
    """

    mean_s: float
    error: float
    spread: float
    slow_steps_s: tuple[float, ...] = ()


def step_times(runs: Sequence[float]) -> StepTimes:
    """Return the step time in steady state, without the warm-up.

    Parameters
    ----------
    runs : sequence of float
        Mean seconds of a step in each run of one or more steps; at least one run.
    """
    steady = runs[min(math.ceil(WARM_UP_SHARE * len(runs)), len(runs) - 1) :]
    median = statistics.median(steady)
    # The median absolute deviation times 1.4826 estimates a normal distribution's standard deviation.
    deviation = 1.4826 * statistics.median(abs(seconds - median) for seconds in steady)
    # Both limits: with very steady steps five deviations are a tiny part of the median.
    limit = median + max(OUTLIER_SPREADS * deviation, OUTLIER_SHARE * median)
    counted = [seconds for seconds in steady if seconds <= limit]
    mean = statistics.fmean(counted)
    return StepTimes(
        mean_s=mean,
        error=_half_width(counted) / mean,
        spread=deviation / mean,
        slow_steps_s=tuple(seconds for seconds in steady if seconds > limit),
    )


def is_known(runs: Sequence[float], timed_s: float) -> bool:
    """Return true if the rate is known within `WANTED_ERROR`, or if `MOST_S` have been spent.

    Parameters
    ----------
    timed_s : float
        Total seconds of all runs.
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
