"""Constant numbers of GPUs from start to end: times of members, and lower bounds of schedules."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from operator import neg

from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import EpochTimeline

PRECISION = 1e-12
"""Relative precision of the bound, approached from below; also the tolerance for equal GPU-seconds."""


@dataclass(frozen=True)
class Allotments:
    """Useful numbers of GPUs of a member: each is faster than all smaller ones.

    Parameters
    ----------
    gpus : tuple of int
        Numbers of GPUs, ascending.
    seconds : tuple of float
        Seconds from start to end on each number of GPUs, descending.
    thriftiest : tuple of int
        For each index, the index from there on with the fewest GPU-seconds.
    """

    gpus: tuple[int, ...]
    seconds: tuple[float, ...]
    thriftiest: tuple[int, ...]

    @classmethod
    def of(cls, seconds: Mapping[int, float]) -> Allotments:
        """Return the allotments, without numbers of GPUs that are no faster than a smaller number."""
        gpus: list[int] = []
        for m in sorted(seconds):
            if not gpus or seconds[m] < seconds[gpus[-1]]:
                gpus.append(m)
        areas = [m * seconds[m] for m in gpus]
        thriftiest = [len(gpus) - 1]
        for at in reversed(range(len(gpus) - 1)):
            best = thriftiest[-1]
            # Equal areas differ by rounding; the tolerance then prefers fewer GPUs.
            thriftiest.append(at if areas[at] <= areas[best] * (1 + PRECISION) else best)
        return cls(tuple(gpus), tuple(seconds[m] for m in gpus), tuple(reversed(thriftiest)))

    def within(self, limit_s: float) -> int:
        """Return the index with the fewest GPU-seconds among those that take at most `limit_s`.

        If none is that fast, return the fastest one.
        """
        at = bisect_left(self.seconds, -limit_s, key=neg)
        return self.thriftiest[min(at, len(self.gpus) - 1)]

    def area(self, at: int) -> float:
        """Return the GPU-seconds at an index."""
        return self.gpus[at] * self.seconds[at]


def allotments_of(workload: Workload, allowed: Container[int]) -> Allotments:
    """Return the allotments of a member among the `allowed` numbers of GPUs, at least one of its own.

    Start-up, evaluations and checkpoints are included in its time.
    """
    timeline = EpochTimeline(workload, 1.0)
    fixed_s = workload.startup_s + timeline.count * timeline.overhead_s
    left = workload.samples_left
    return Allotments.of({m: fixed_s + left / rate for m, rate in workload.rates.items() if m in allowed})


def allotment_bound(members: Sequence[Allotments], gpus: int) -> float:
    """Return a lower bound in seconds of schedules with constant allotments; 0 without members.

    The bound is the least T with sum_i min{m * t_i(m) : t_i(m) <= T} <= `gpus` * T, and without a member
    that takes longer than T on all numbers of GPUs (the dual approximation of Turek et al.; the area bound
    of Mounie, Rapine and Trystram). Node boundaries are ignored, so real schedules may take longer.
    """
    if not members:
        return 0.0
    low = max(m.seconds[-1] for m in members)
    low = max(low, math.fsum(m.area(m.thriftiest[0]) for m in members) / gpus)
    if _fits(members, low, gpus):
        return low
    high = math.fsum(m.seconds[0] for m in members)
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        if _fits(members, middle, gpus):
            high = middle
        else:
            low = middle
    return low


def _fits(members: Sequence[Allotments], limit_s: float, gpus: int) -> bool:
    area = math.fsum(member.area(member.within(limit_s)) for member in members)
    return area <= gpus * limit_s * (1 + PRECISION)
