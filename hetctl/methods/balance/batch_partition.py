"""Partition of a total batch that minimises the time of the slowest worker, for any time curves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

NEAR = 1e-12
"""Relative width of the bracket at which the bisection for a time ends."""
STEPS = 200
"""Most bisection steps; they run out only for times near 0, where the relative width is not reached."""


class Times(Protocol):
    """Non-decreasing time curves of all workers, each rising without limit in the end."""

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
    # Workers that tie for the last samples get them in their order, so that the total is exact.
    shares += np.clip(missing - (np.cumsum(room) - room), 0, room)
    return shares.astype(np.int64)


def _bracket(
    within: Callable[[float], Values], guess_s: float, total: int, stop_at_total: bool = False
) -> tuple[float, float]:
    """Return two times: at the first, at most `total` samples are processed; at the second, at least.

    They are adjacent, unless `stop_at_total` ends the search at a time with exactly `total` samples.
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
        # Any time with exactly `total` whole samples gives the result; the least such time is not needed.
        if high - low <= NEAR * high or (stop_at_total and done == total):
            break
    return low, high
