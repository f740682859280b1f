"""Time curves, and the partition of a total batch that minimises the time of the slowest worker."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.values import dataclass

Values = NDArray[np.float64]

NEAR = 1e-12
"""Relative width of the bracket at which the bisection of a time ends."""
STEPS = 200
"""Most bisection steps, needed only near time 0, where the relative width stays above `NEAR`."""


class Times(Protocol):
    """Non-decreasing, unbounded time curves of all workers."""

    def seconds(self, batches: Values) -> Values:
        """Return the time in seconds of each worker with its batch."""

    def batches(self, seconds: float) -> Values:
        """Return the largest batch of each worker that takes at most `seconds`."""


@dataclass(frozen=True)
class Lines:
    """Linear time curves: launch overhead and time per sample, arrays of shape (workers,).

    Parameters
    ----------
    launch : array
        Launch overhead in seconds.
    per_sample : array
        Seconds per sample, above 0.
    """

    launch: Values
    per_sample: Values

    def seconds(self, batches: Values) -> Values:
        """Return the time in seconds of each worker with its batch."""
        return self.launch + self.per_sample * batches

    def batches(self, seconds: float) -> Values:
        """Return the batch of each worker that takes `seconds`; negative if launching takes longer."""
        found: Values = (seconds - self.launch) / self.per_sample
        return found


def fluid_time(times: Times, total: int, caps: Values) -> float:
    """Return the least t at which fractional batches from 1 to the caps sum up to `total`.

    Parameters
    ----------
    caps : array of shape (workers,)
        Largest batch of each worker, at least 1 each and `total` in sum; infinite for no cap.
    """
    first_s = float(times.seconds(np.ones_like(caps)).max())
    _, enough_s = _bracket(lambda t: np.clip(times.batches(t), 1, caps), first_s, total)
    return max(enough_s, first_s)


def whole_batches(times: Times, total: int, caps: Values) -> NDArray[np.int64]:
    """Return integer batches from 1 to the caps with sum `total` that minimise the longest time.

    Workers whose time for a single sample exceeds that time do not affect the balance of the others.

    Parameters
    ----------
    caps : array of shape (workers,)
        Largest batch of each worker, integers of at least 1 and `total` in sum; infinite for no cap.
    """

    def within(seconds: float) -> Values:
        return np.clip(np.floor(times.batches(seconds)), 1, caps)

    first_s = float(times.seconds(np.ones_like(caps)).max())
    low, high = _bracket(within, first_s, total, stop_at_total=True)
    shares = within(low)
    missing = total - shares.sum()
    room = np.minimum(within(high) - shares, missing)
    # Tied workers get the last samples in order, so that the total is exact.
    shares += np.clip(missing - (np.cumsum(room) - room), 0, room)
    return shares.astype(np.int64)


def _bracket(
    within: Callable[[float], Values], guess_s: float, total: int, stop_at_total: bool = False
) -> tuple[float, float]:
    """Return two adjacent times, the first for at most, the second for at least `total` samples.

    `stop_at_total` ends the search early at a time with exactly `total` samples.
    """
    low, high = 0.0, guess_s
    if within(low).sum() >= total:
        return low, low
    while within(high).sum() < total:
        low, high = high, 2 * high
    for _ in range(STEPS):
        middle = (low + high) / 2
        done = within(middle).sum()
        if done < total:
            low = middle
        else:
            high = middle
        # Any time with exactly `total` whole samples gives the result; it need not be the least.
        if high - low <= NEAR * high or (stop_at_total and done == total):
            break
    return low, high


@dataclass(frozen=True)
class TimeCurve:
    """Iteration time in seconds by batch: Gamma_i of LB-BSP, section 3.1, plus communication.

    Piecewise linear and non-decreasing: a point below an earlier one is raised to it. Below the first point,
    the first line continues to its launch overhead, at least 0. Above the last point, the last line
    continues; if it is flat, or there is a single point, time is proportional to the batch.

    Parameters
    ----------
    points : tuple of (float, float)
        Batch and seconds, in any order; at least one point.
    cap : int or None
        Largest batch that fits into memory; None for no cap.

    Raises
    ------
    BadInputError
        If there is no point, two points have the same batch, or a number is not finite and above 0.
    """

    points: tuple[tuple[float, float], ...]
    cap: int | None = None

    def __post_init__(self) -> None:
        batches = [batch for batch, _ in self.points]
        if not batches or len(set(batches)) < len(batches):
            raise BadInputError(f"a time curve needs points of distinct batches, not {list(self.points)}")
        if not all(math.isfinite(number) and number > 0 for point in self.points for number in point):
            raise BadInputError(f"batches and seconds must be finite and above 0, not {list(self.points)}")
        if self.cap is not None and self.cap < 1:
            raise BadInputError(f"the largest batch is {self.cap}, but must be at least 1")

    def seconds(self, batch: float) -> float:
        """Return the time in seconds of an iteration with this batch."""
        batches, seconds, slopes = self._lines
        at = max(bisect_right(batches, batch) - 1, 0)
        return seconds[at] + slopes[at] * (batch - batches[at])

    def batch(self, seconds: float) -> float:
        """Return the largest batch, up to the cap, that takes at most `seconds`; 0 if none does."""
        batches, starts, slopes = self._lines
        at = bisect_right(starts, seconds) - 1
        if at < 0:
            return 0.0
        # bisect_right passes to the end of a flat part, so the slope is not 0.
        found = batches[at] + (seconds - starts[at]) / slopes[at]
        return found if self.cap is None else min(found, float(self.cap))

    @cached_property
    def _lines(self) -> tuple[list[float], list[float], list[float]]:
        """Start of each line (batch, seconds) and its slope; the last line is not flat."""
        batches, given = zip(*sorted(self.points), strict=True)
        raised = list(accumulate(given, max))
        slopes = [
            (raised[at + 1] - raised[at]) / (batches[at + 1] - batches[at]) for at in range(len(batches) - 1)
        ]
        proportion = raised[-1] / batches[-1]
        slopes.append((slopes[-1] if slopes else 0.0) or proportion)
        launch = max(raised[0] - slopes[0] * batches[0], 0.0) if len(batches) > 1 else 0.0
        first = (raised[0] - launch) / batches[0]
        return [0.0, *batches], [launch, *raised], [first, *slopes]


def balance_time(curves: Sequence[TimeCurve], total: int) -> float:
    """Return t* in seconds, the least t with sum_i Gamma_i^-1(t) >= `total`, 1 <= x_i <= cap_i.

    No split of the batch takes less time, not even into fractions of samples.

    Raises
    ------
    BadInputError
        If there are fewer samples than workers.
    InfeasibleError
        If the sum of the caps is below `total`.
    """
    caps = cap_limits([curve.cap for curve in curves])
    check_room(total, caps)
    return fluid_time(_Curves(curves), total, caps)


def balanced(curves: Sequence[TimeCurve], total: int) -> tuple[int, ...]:
    """Return the integer batches that minimise the slowest worker's time: Equation 3 of LB-BSP.

    Raises
    ------
    BadInputError, InfeasibleError
        See `balance_time`.
    """
    caps = cap_limits([curve.cap for curve in curves])
    check_room(total, caps)
    return tuple(whole_batches(_Curves(curves), total, caps).tolist())


def cap_limits(caps: Sequence[int | None]) -> NDArray[np.float64]:
    """Return the caps as floats, infinite for None."""
    return np.array([math.inf if cap is None else cap for cap in caps], dtype=float)


def check_room(total: int, caps: NDArray[np.float64]) -> None:
    """Reject a total batch too small for the workers or too large for their caps.

    Raises
    ------
    BadInputError, InfeasibleError
        See `balance_time`.
    """
    if len(caps) == 0 or total < len(caps):
        raise BadInputError(
            f"a batch of {total} samples is too small for {len(caps)} workers: each takes at least 1"
        )
    if total > caps.sum():
        raise InfeasibleError(
            f"a batch of {total} samples does not fit: the workers hold {caps.sum():.0f} in all",
            hint="a smaller batch, or more workers",
        )


@dataclass(frozen=True)
class _Curves:
    curves: Sequence[TimeCurve]

    def seconds(self, batches: NDArray[np.float64]) -> NDArray[np.float64]:
        pairs = zip(self.curves, batches.tolist(), strict=True)
        return np.array([curve.seconds(batch) for curve, batch in pairs])

    def batches(self, seconds: float) -> NDArray[np.float64]:
        return np.array([curve.batch(seconds) for curve in self.curves])
