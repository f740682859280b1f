"""Number of preprocessors for a demand (FLEET, appendix B.3)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

from hetctl.model.profile import PreprocessPoint

HEADROOM = 2.0
"""Ratio of the throughput of preprocessors to the rate that they feed: where too few of them have limited a
rate, more work in the next round, and the rate rises."""


def preprocessors_needed(points: Sequence[PreprocessPoint], demand: float, most: int) -> int:
    """Return the least number of cores whose throughput meets a demand (appendix B.3).

    Throughput is interpolated linearly between the measured numbers of cores; beyond them it is in
    proportion to the cores. A measurement on more cores never counts for less than one on fewer cores.

    Parameters
    ----------
    points
        Measured throughputs; without any, the result is one core.
    demand : float
        Demand in samples/s.
    most : int
        Number of available cores.
    """
    known: list[tuple[int, float]] = [(0, 0.0)]
    for point in sorted(points, key=lambda point: point.cores):
        # More cores may measure slower; a falling curve would have no least number for a demand.
        known.append((point.cores, max(point.rate, known[-1][1])))
    for cores in range(1, most):
        if _throughput(known, cores) >= demand:
            return cores
    return most if len(known) > 1 else 1


def seen_points(rates: Iterable[float | None]) -> tuple[PreprocessPoint, ...]:
    """Return the throughput to count on for one core, by what training has shown; empty if it has shown none.

    Parameters
    ----------
    rates
        Samples/s of a preprocessor of each member, of which the median counts; None: unknown.
    """
    known = [rate for rate in rates if rate]
    return (PreprocessPoint(1, statistics.median(known) / HEADROOM),) if known else ()


def _throughput(known: Sequence[tuple[int, float]], cores: int) -> float:
    for (fewer, low), (more, high) in pairwise(known):
        if cores <= more:
            return low + (high - low) * (cores - fewer) / (more - fewer)
    last_cores, last = known[-1]
    return last * cores / last_cores if last_cores else float("inf")
