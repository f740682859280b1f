"""Times of members: epochs at a constant rate, and runs on constant numbers of GPUs with their bounds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from operator import neg

from hetctl.model.values import dataclass
from hetctl.model.workload import Workload

TOLERANCE = 1e-9
"""Tolerance in epochs, so that rounding neither adds nor removes an epoch."""
MAX_UNINTERRUPTED_SHARE = 0.9
"""Share of a whole job's time above which an epoch is trained in parts."""


def task_s(workload: Workload, rate: float) -> float:
    """Return the seconds until a member that trains without interruption has converged."""
    timeline = EpochTimeline(workload, rate)
    return workload.startup_s + timeline.end_of(timeline.count)


def least_task_s(workload: Workload, rate: float, max_uninterrupted_s: float = math.inf) -> float:
    """Return the least seconds of a useful task: its start-up and one epoch.

    If that is longer than `max_uninterrupted_s`, any part of the epoch is useful, as it ends with a
    checkpoint.
    """
    first = EpochTimeline(workload, rate).end_of(1) if workload.samples_per_epoch else 0.0
    whole = workload.startup_s + max(first, workload.checkpoint_s)
    return whole if whole <= max_uninterrupted_s else workload.startup_s + workload.checkpoint_s


def has_room(
    workload: Workload, rate: float, start_s: float, deadline_s: float, max_uninterrupted_s: float = math.inf
) -> bool:
    """Return true if a task that begins at `start_s` can be useful before the deadline (`least_task_s`)."""
    timeline = EpochTimeline(workload, rate)
    training_s = deadline_s - (start_s + workload.startup_s)
    if training_s >= 0 and (timeline.epochs_within(training_s) or not timeline.count):
        return True
    in_parts = not workload.samples_per_epoch or workload.startup_s + timeline.end_of(1) > max_uninterrupted_s
    return in_parts and training_s > workload.checkpoint_s


class EpochTimeline:
    """Epochs of a member that trains without interruption; seconds count from the end of its start-up.

    Epochs end when the samples left are a multiple of an epoch's samples, so that the first one is shorter
    for a member that was stopped within an epoch. If the length of an epoch is unknown, all remaining work
    is one epoch without evaluation.
    """

    __slots__ = ("count", "each", "first", "left", "overhead_s", "rate")

    def __init__(self, workload: Workload, rate: float, left: float | None = None) -> None:
        left = workload.samples_left if left is None else left
        self.each = float(workload.samples_per_epoch or left or 1.0)
        # Work left is a difference of floats: 3.0000000001 epochs are three.
        self.count = max(1, math.ceil(left / self.each - TOLERANCE)) if left else 0
        self.first = left - max(self.count - 1, 0) * self.each
        self.left = left
        self.rate = rate
        self.overhead_s = workload.overhead_s

    def size_of(self, epoch: int) -> float:
        """Return the samples of an epoch, counted from 0."""
        return self.each if epoch else self.first

    def end_of(self, epochs: int) -> float:
        """Return the seconds until that many epochs are finished, with evaluation and checkpoint."""
        if epochs == 0:
            return 0.0
        return (self.first + (epochs - 1) * self.each) / self.rate + epochs * self.overhead_s

    def epochs_within(self, seconds: float) -> int:
        """Return the number of epochs that end within a number of seconds."""
        period_s = self.each / self.rate + self.overhead_s
        further = (seconds - self.end_of(1)) / period_s + TOLERANCE
        # The minimum comes before int(), which raises for an infinite time.
        return 0 if further < 0 else 1 + int(min(self.count - 1, further))

    def left_after(self, epochs: int) -> float:
        """Return the samples left after that many epochs."""
        return (self.count - epochs) * self.each if epochs else self.left

    def left_at(self, seconds: float) -> float:
        """Return the samples left after a number of seconds."""
        epochs = self.epochs_within(seconds)
        if epochs >= self.count:
            return 0.0
        trained = max(seconds - self.end_of(epochs), 0.0) * self.rate
        return self.left_after(epochs) - min(trained, self.size_of(epochs))


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
    """Return the allotments of a member among the `allowed` numbers of GPUs, which must have one of its own.

    Start-up, evaluations and checkpoints are included in its time.
    """
    timeline = EpochTimeline(workload, 1.0)
    fixed_s = workload.startup_s + timeline.count * timeline.overhead_s
    left = workload.samples_left
    return Allotments.of({m: fixed_s + left / rate for m, rate in workload.rates.items() if m in allowed})


def allotment_bound(members: Sequence[Allotments], gpus: int) -> float:
    """Return a lower bound in seconds of schedules with constant allotments; 0 without members.

    The bound is the least T with sum_i min{m * t_i(m) : t_i(m) <= T} <= `gpus` * T in which every member
    can end (the dual approximation of Turek et al.; the area bound of Mounie, Rapine and Trystram). Node
    boundaries are ignored, so real schedules may take longer.
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
