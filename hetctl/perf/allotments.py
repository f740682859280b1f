"""Constant numbers of GPUs from start to end: how long members take, and what no schedule can beat."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from operator import neg

from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import EpochTimeline

PRECISION = 1e-12
"""Of the bound, which is approached from below, and of equal GPU-seconds: fewer GPUs are taken."""


@dataclass(frozen=True)
class Allotments:
    """The numbers of GPUs that may be worth giving to a member: each is faster than all smaller ones.

    Parameters
    ----------
    gpus : tuple of int
        Rising.
    seconds : tuple of float
        From start to end on as many GPUs, falling.
    thriftiest : tuple of int
        For each index, which one from there on takes the fewest GPU-seconds.
    """

    gpus: tuple[int, ...]
    seconds: tuple[float, ...]
    thriftiest: tuple[int, ...]

    @classmethod
    def of(cls, seconds: Mapping[int, float]) -> Allotments:
        """Leave out what takes more GPUs for no less time."""
        gpus: list[int] = []
        for m in sorted(seconds):
            if not gpus or seconds[m] < seconds[gpus[-1]]:
                gpus.append(m)
        areas = [m * seconds[m] for m in gpus]
        thriftiest = [len(gpus) - 1]
        for at in reversed(range(len(gpus) - 1)):
            best = thriftiest[-1]
            thriftiest.append(at if areas[at] <= areas[best] * (1 + PRECISION) else best)
        return cls(tuple(gpus), tuple(seconds[m] for m in gpus), tuple(reversed(thriftiest)))

    def within(self, limit_s: float) -> int:
        """Return the index with the fewest GPU-seconds of those that take at most `limit_s`.

        The fastest one stands in where none is that fast.
        """
        at = bisect_left(self.seconds, -limit_s, key=neg)
        return self.thriftiest[min(at, len(self.gpus) - 1)]

    def area(self, at: int) -> float:
        """Return the GPU-seconds of one of them."""
        return self.gpus[at] * self.seconds[at]


def allotments_of(workload: Workload, allowed: Container[int]) -> Allotments:
    """Return what a member may run on of the `allowed` numbers of GPUs, which have to include 1.

    Start-up, evaluations and checkpoints are included in its time.
    """
    course = EpochTimeline(workload, 1.0)
    fixed_s = workload.startup_s + course.count * course.overhead_s
    left = workload.samples_left
    return Allotments.of({m: fixed_s + left / rate for m, rate in workload.rates.items() if m in allowed})


def allotment_bound(members: Sequence[Allotments], gpus: int) -> float:
    """Return seconds in which no schedule of constant allotments can be done; 0 without members.

    The least T with sum_i min{m * t_i(m) : t_i(m) <= T} <= `gpus` * T, and no member that takes longer
    than T on all numbers of GPUs (the dual approximation of Turek et al.; the area side of Mounie,
    Rapine and Trystram). Node boundaries are left out, so real schedules may take longer.
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


def constant_bound(workloads: Sequence[Workload], gpus: int) -> float:
    """Return seconds in which no schedule without resizing can be done with these members."""
    allowed = range(1, gpus + 1)
    return allotment_bound([allotments_of(workload, allowed) for workload in workloads], gpus)


def _fits(members: Sequence[Allotments], limit_s: float, gpus: int) -> bool:
    area = math.fsum(member.area(member.within(limit_s)) for member in members)
    return area <= gpus * limit_s * (1 + PRECISION)
