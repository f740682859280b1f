"""A total batch shared out so that the slowest worker is as fast as can be, whatever their time curves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

NEAR = 1e-12
"""Relative width at which the search for a time ends."""
STEPS = 200
"""Of that search; for times that are 0 in comparison with what they are looked for among."""


class Times(Protocol):
    """The time curves of all workers, none of them falling, all rising without limit in the end."""

    def seconds(self, batches: Numbers) -> Numbers:
        """Return the seconds of each worker with its batch."""

    def batches(self, seconds: float) -> Numbers:
        """Return the largest batch of each worker that takes at most so long."""


@dataclass(frozen=True)
class Lines:
    """Time curves of a launch overhead and seconds per sample, arrays of shape (workers,).

    Parameters
    ----------
    launch : array
        In seconds.
    per_sample : array
        In seconds, above 0.
    """

    launch: Numbers
    per_sample: Numbers

    def seconds(self, batches: Numbers) -> Numbers:
        """Return the seconds of each worker with its batch."""
        return self.launch + self.per_sample * batches

    def batches(self, seconds: float) -> Numbers:
        """Return the batch of each worker that takes so long; below 0 where launching takes longer."""
        found: Numbers = (seconds - self.launch) / self.per_sample
        return found


def fluid_time(times: Times, total: int, caps: Numbers) -> float:
    """Return the least t at which batches from 1 to the caps, parts of samples allowed, reach `total`.

    Parameters
    ----------
    caps : array of shape (workers,)
        At least 1 each and `total` together; infinite where there is none.
    """
    first_s = float(times.seconds(np.ones_like(caps)).max())
    _, enough_s = _bracket(lambda t: np.clip(times.batches(t), 1, caps), first_s, total)
    return max(enough_s, first_s)


def whole_batches(times: Times, total: int, caps: Numbers) -> NDArray[np.int64]:
    """Return the whole batches from 1 to the caps with sum `total` whose longest time is the shortest.

    Workers that a single sample keeps longer than that do not hold up the balance of the others.

    Parameters
    ----------
    caps : array of shape (workers,)
        Whole numbers, at least 1 each and `total` together; infinite where there is none.
    """

    def within(seconds: float) -> Numbers:
        return np.clip(np.floor(times.batches(seconds)), 1, caps)

    first_s = float(times.seconds(np.ones_like(caps)).max())
    low, high = _bracket(within, first_s, total, stop_at_total=True)
    shares = within(low)
    missing = total - shares.sum()
    room = np.minimum(within(high) - shares, missing)
    shares += np.clip(missing - (np.cumsum(room) - room), 0, room)
    return shares.astype(np.int64)


def _bracket(
    within: Callable[[float], Numbers], guess_s: float, total: int, stop_at_total: bool = False
) -> tuple[float, float]:
    """Return two times: within one too little gets done, or just enough; in the other, enough.

    They are neighbours, unless the search may stop at a time in which just enough gets done.
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
        if high - low <= NEAR * high or (stop_at_total and done == total):
            break
    return low, high
