"""How long an iteration takes a worker by its batch, and the time at which all workers end together."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.balance.batch_partition import fluid_time, whole_batches
from hetctl.model.errors import BadInputError, InfeasibleError


@dataclass(frozen=True)
class TimeCurve:
    """Seconds of one iteration by the batch: Gamma_i of LB-BSP, section 3.1, with what it sends.

    Straight from point to point, and never falling: a point below an earlier one is raised to it. Below the
    first point the first line goes on to its launch overhead, at least 0; above the last point the
    last line goes on, or, where that is flat, the proportion. A single point means in proportion.

    Parameters
    ----------
    points : tuple of (float, float)
        Batch and seconds, in any order; at least one.
    cap : int or None
        The largest batch that fits into memory.

    Raises
    ------
    BadInputError
        If there is no point, a batch occurs twice, or a number is not finite and above 0.
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
        """Return the seconds of an iteration with that batch."""
        batches, seconds, slopes = self._lines
        at = max(bisect_right(batches, batch) - 1, 0)
        return seconds[at] + slopes[at] * (batch - batches[at])

    def batch(self, seconds: float) -> float:
        """Return the largest batch, up to the cap, that takes at most so long; 0 if none does."""
        batches, starts, slopes = self._lines
        at = bisect_right(starts, seconds) - 1
        if at < 0:
            return 0.0
        found = batches[at] + (seconds - starts[at]) / slopes[at]
        return found if self.cap is None else min(found, float(self.cap))

    @cached_property
    def _lines(self) -> tuple[list[float], list[float], list[float]]:
        """Where each line starts, in batch and seconds, and its slope; the last one is not flat."""
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
    """Return t*, the least t with sum_i Gamma_i^-1(t) >= `total`, 1 <= x_i <= cap_i, in seconds.

    No split of the batch takes less, not even with parts of samples.

    Raises
    ------
    BadInputError
        If there are fewer samples than workers.
    InfeasibleError
        If the caps leave no room for all samples.
    """
    caps = _caps(curves)
    check_room(total, caps)
    return fluid_time(_Curves(curves), total, caps)


def balanced(curves: Sequence[TimeCurve], total: int) -> tuple[int, ...]:
    """Return the whole batches whose slowest iteration is the fastest: LB-BSP's Equation 3.

    Raises
    ------
    BadInputError, InfeasibleError
        As `balance_time`.
    """
    caps = _caps(curves)
    check_room(total, caps)
    return tuple(whole_batches(_Curves(curves), total, caps).tolist())


def check_room(total: int, caps: NDArray[np.float64]) -> None:
    """Refuse a total batch that is too small for the workers, or too large for their caps.

    Raises
    ------
    BadInputError, InfeasibleError
        As `balance_time`.
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


def _caps(curves: Sequence[TimeCurve]) -> NDArray[np.float64]:
    return np.array([math.inf if curve.cap is None else curve.cap for curve in curves], dtype=float)


@dataclass(frozen=True)
class _Curves:
    curves: Sequence[TimeCurve]

    def seconds(self, batches: NDArray[np.float64]) -> NDArray[np.float64]:
        pairs = zip(self.curves, batches.tolist(), strict=True)
        return np.array([curve.seconds(batch) for curve, batch in pairs])

    def batches(self, seconds: float) -> NDArray[np.float64]:
        return np.array([curve.batch(seconds) for curve in self.curves])
