"""Number of preprocessors for a demand (FLEET, appendix B.3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hetctl.model.profile import PreprocessPoint


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


def _throughput(known: Sequence[tuple[int, float]], cores: int) -> float:
    for (fewer, low), (more, high) in pairwise(known):
        if cores <= more:
            return low + (high - low) * (cores - fewer) / (more - fewer)
    last_cores, last = known[-1]
    return last * cores / last_cores if last_cores else float("inf")
