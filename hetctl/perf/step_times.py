"""Rates from timed training steps, and from what a script of the user's own reports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hetctl.model.values import dataclass

WANTED_ERROR = 0.03
"""Half-width of the confidence interval of a rate, relative to it, that is accurate enough."""
WANTED_IN_TRAINING = 0.05
"""The same for a rate that is timed in training."""
LEAST_RUNS = 6
LEAST_TIMED_S = 0.6
"""Least time in seconds for which steps are timed: disturbances change more slowly than fast steps."""
MOST_TIMED_S = 4.0
"""Time in seconds after which timing ends even if the steps vary, once there are `LEAST_RUNS` runs."""
WARM_UP_SHARE = 0.25
"""Share of the first runs that is discarded: caches, clocks and allocators warm up."""
BATCH_MEANS = 10
"""Groups for batch means: neighbouring runs are correlated, so the error is computed from group means."""
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
    # The second limit is for very steady steps, whose five deviations are a tiny part of the median.
    limit = median + max(OUTLIER_SPREADS * deviation, OUTLIER_SHARE * median)
    counted = [seconds for seconds in steady if seconds <= limit]
    mean = statistics.fmean(counted)
    return StepTimes(
        mean_s=mean,
        error=_half_width(counted) / mean,
        spread=deviation / mean,
        slow_steps_s=tuple(seconds for seconds in steady if seconds > limit),
    )


def is_known(runs: Sequence[float], timed_s: float, wanted_error: float = WANTED_ERROR) -> bool:
    """Return true if the rate is known within an error, or if `MOST_TIMED_S` have been spent.

    Parameters
    ----------
    timed_s : float
        Total seconds of all runs.
    """
    if len(runs) < LEAST_RUNS or timed_s < LEAST_TIMED_S:
        return False
    return timed_s >= MOST_TIMED_S or step_times(runs).error <= wanted_error


def _half_width(seconds: Sequence[float]) -> float:
    """Return the half-width of the confidence interval of the mean, by batch means."""
    groups = min(BATCH_MEANS, len(seconds))
    if groups < 2:
        return math.inf
    ends = [group * len(seconds) // groups for group in range(groups + 1)]
    means = [statistics.fmean(seconds[start:end]) for start, end in pairwise(ends)]
    mean = math.fsum(means) / groups
    # In place of `statistics.stdev`, whose fractions take longer than steps of small networks.
    variance = math.fsum((each - mean) ** 2 for each in means) / (groups - 1)
    return STUDENT_T[groups - 2] * math.sqrt(variance / groups)


RUN_S = 0.1
"""Shortest time in seconds between two reports that counts as one run of steps."""
LEAST_EPOCH_SHARE = 0.5
"""Least share of an epoch between two reports whose rate counts as the epoch's."""


@dataclass(frozen=True)
class Mark:
    """Report of a script, at the time of its arrival.

    Parameters
    ----------
    time : float
        Seconds, by any clock.
    epoch : int
        Number of the epoch.
    samples : float
        Samples of the epoch that are done; 0: the script did not say.
    finished : bool
        True at the end of the epoch.
    seconds : float or None
        Seconds of training in a finished epoch, if the script said so.
    """

    time: float
    epoch: int
    samples: float
    finished: bool = True
    seconds: float | None = None


@dataclass(frozen=True)
class EpochPace:
    """Rate of an epoch in samples/s, and its seconds beyond its samples at that rate; None: not known."""

    rate: float | None = None
    overhead_s: float | None = None


@dataclass(frozen=True)
class ScriptPace:
    """Rate of a script in steady state.

    Parameters
    ----------
    per_sample : StepTimes
        Times of a sample.
    runs : int
        Number of timed runs between two reports.
    startup_s : float
        Seconds from its start to its first sample.
    epoch_s : float
        Mean seconds of an epoch beyond its samples at the rate; 0 if none was seen from end to end.
    epoch_samples : float or None
        Samples of its last finished epoch; None: it has finished none.
    """

    per_sample: StepTimes
    runs: int
    startup_s: float
    epoch_s: float
    epoch_samples: float | None

    @property
    def rate(self) -> float:
        """Samples per second."""
        return 1 / self.per_sample.mean_s


def add_mark(marks: Sequence[Mark], mark: Mark) -> list[Mark]:
    """Return the marks with a new one; of those within an epoch the first and the last are kept."""
    within = [other for other in marks[-2:] if not other.finished and other.epoch == mark.epoch]
    kept = marks[:-1] if len(within) == 2 else marks
    return [*kept, mark]


def epoch_pace(marks: Sequence[Mark]) -> EpochPace:
    """Return the pace of the epoch that the last of the marks has finished.

    If the script gave no seconds for it, reports within it count if they span half of it. Else the time since
    the previous epoch counts or, after a start, the time since the first report.

    Parameters
    ----------
    marks : sequence of Mark
        Marks from the end of the epoch before, if the script has trained it, to the end of this one.
    """
    *earlier, end = marks
    before = next((mark for mark in earlier if mark.finished), None)
    if not end.samples:
        return EpochPace()
    whole_s = end.time - before.time if before else None
    parts = [mark for mark in earlier if not mark.finished and mark.epoch == end.epoch]
    rate = end.samples / end.seconds if end.seconds else _rate_of_parts(parts, end.samples)
    if rate:
        overhead_s = None if whole_s is None else max(0.0, whole_s - end.samples / rate)
        return EpochPace(rate, overhead_s)
    rate = end.samples / whole_s if whole_s else _rate_between(parts[0], end) if parts else None
    return EpochPace(rate, None if rate is None else 0.0)


def script_pace(marks: Sequence[Mark], began: float) -> ScriptPace | None:
    """Return the pace of a script; None if it has not reported enough.

    Parameters
    ----------
    marks : sequence of Mark
        Marks by time.
    began : float
        Start of the script, by the clock of the marks.
    """
    marks = [mark for mark in marks if mark.samples]
    if not (runs := [seconds / samples for samples, seconds in _runs(marks)]):
        return None
    times = step_times(runs)
    first, ends = marks[0], [mark for mark in marks if mark.finished]
    trained_s = first.samples * times.mean_s
    beyond = [
        end.time - start.time - end.samples * times.mean_s
        for start, end in pairwise(ends)
        if end.epoch > start.epoch
    ]
    return ScriptPace(
        per_sample=times,
        runs=len(runs),
        startup_s=max(0.0, first.time - began - trained_s),
        epoch_s=max(0.0, statistics.fmean(beyond)) if beyond else 0.0,
        epoch_samples=ends[-1].samples if ends else None,
    )


def is_measured(marks: Sequence[Mark]) -> bool:
    """Return true if the rate is known, and a whole epoch was seen from end to end."""
    return known_times(marks) is not None and sum(mark.finished for mark in marks if mark.samples) > 1


def known_times(marks: Sequence[Mark], wanted_error: float = WANTED_ERROR) -> StepTimes | None:
    """Return the times of a sample once `is_known` is true of them, else None."""
    runs = list(_runs([mark for mark in marks if mark.samples]))
    of_samples = [seconds / samples for samples, seconds in runs]
    known = is_known(of_samples, sum(seconds for _, seconds in runs), wanted_error)
    return step_times(of_samples) if known else None


def is_new_run(marks: Sequence[Mark], mark: Mark) -> bool:
    """Return false if a mark is so soon after the last of the marks that it ends no run of steps."""
    last = marks[-1] if marks else None
    return last is None or mark.finished or mark.epoch != last.epoch or mark.time - last.time >= RUN_S


def _runs(marks: Sequence[Mark]) -> Iterator[tuple[float, float]]:
    """Yield samples and seconds of runs of steps: those within epochs, else of whole epochs."""
    within = list(_runs_within(marks))
    yield from within or _whole_epochs([mark for mark in marks if mark.finished])


def _runs_within(marks: Sequence[Mark]) -> Iterator[tuple[float, float]]:
    begin: Mark | None = None
    for mark in marks:
        if mark.finished or begin is None or mark.epoch != begin.epoch or mark.samples <= begin.samples:
            begin = None if mark.finished else mark
        elif mark.time - begin.time >= RUN_S:
            yield mark.samples - begin.samples, mark.time - begin.time
            begin = mark


def _whole_epochs(ends: Sequence[Mark]) -> Iterator[tuple[float, float]]:
    """Yield samples and seconds of finished epochs; the first has seconds only if the script gave them."""
    for before, end in zip([None, *ends], ends, strict=False):
        seconds = end.seconds or (end.time - before.time if before else None)
        if seconds:
            yield end.samples, seconds


def _rate_of_parts(parts: Sequence[Mark], samples: float) -> float | None:
    """Return the rate between the first and the last part; None if they are too close to each other."""
    if not parts or parts[-1].samples - parts[0].samples < LEAST_EPOCH_SHARE * samples:
        return None
    return _rate_between(parts[0], parts[-1])


def _rate_between(begin: Mark, end: Mark) -> float | None:
    samples, seconds = end.samples - begin.samples, end.time - begin.time
    return samples / seconds if samples > 0 and seconds > 0 else None
