"""Median stopping rule (Golovin et al., "Google Vizier", 2017, Section 3.1.2), within epochs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from statistics import median

Point = tuple[int, int]
"""Epoch, from 1, and samples trained in it."""
Curve = Sequence[tuple[Point, float]]
"""Losses of a trial by point, in order."""


def is_behind(own: Curve, others: Iterable[Curve], least: int) -> bool:
    """Return true if a trial's newest loss is above the median of those that others had at this point.

    Of each trial that has reached the point, the newest loss up to it counts: trials need not report at the
    same points. The rule of the paper takes averages over all earlier points instead, which hide a late fall.

    Parameters
    ----------
    own : Curve
        Its losses, at least one.
    least : int
        Fewest trials with such a loss; with fewer none is behind.
    """
    point, loss = own[-1]
    there = [curve for curve in others if curve and curve[-1][0] >= point and curve[0][0] <= point]
    losses = [curve[bisect_right(curve, point, key=lambda each: each[0]) - 1][1] for curve in there]
    return len(losses) >= least and loss > median(losses)
