"""Lower bounds of schedules. On GPUs of several types, all count as the fastest for each member."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from hetctl.model.values import dataclass
from hetctl.model.workload import Workload

NEWTON_STEPS = 200

Value = TypeVar("Value")


def fluid_bound(workloads: Sequence[Workload], gpus: int) -> float:
    """Return the least T in seconds with sum_i g_i(W_i / T) <= `gpus`; 0 if nothing is left to do.

    W_i are the samples left and g_i(q) the device time per second needed for rate q, on the concave envelope
    of the member's rate curve: members may be resized arbitrarily at no cost. Start-up, evaluation and
    checkpoints are ignored, so real schedules take longer.

    On m > 1 GPUs a member holds all their time. On one GPU it keeps the device busy for the share b_i of the
    time (`Workload.busy`) and leaves the rest to others, so the curve has the point (b_i, rate on one GPU);
    b_i is 1 for a member that shares with none. This bounds all schedules that share GPUs among members on
    one GPU each: a sample takes the same device time alone and beside others, b_i / rate, no member is faster
    beside others, and a device is busy with one of them at a time. So at any moment a member at rate q uses
    at least g_i(q), and all together at most M. Since g_i is convex, the mean of what it uses until T is at
    least g_i(W_i / T), and the sum of the means is at most M, too.

    A sample of k members of one shape that are one computation takes the device for 1 / r(k), where r(k) is
    their rate together: b_i is then r(1) / r(k) at the best k.
    """
    works = [
        (c.samples_left, envelope_of(c.highest_rates, gpus, c.least_busy))
        for c in workloads
        if c.samples_left > 0
    ]
    return fluid_time(works, gpus)


def makespan_bound(jobs: Sequence[tuple[float, Workload]], gpus: int) -> float:
    """Return a lower bound in seconds from 0 of schedules of members that arrive over time.

    Parameters
    ----------
    jobs : sequence of (seconds, Workload)
        Members with their arrival times.
    """
    soonest = max((at + least_s(workload, gpus) for at, workload in jobs), default=0.0)
    return max(fluid_bound([workload for _, workload in jobs], gpus), soonest)


def mean_jct_bound(jobs: Sequence[tuple[float, Workload]], gpus: int) -> float:
    """Return a lower bound in seconds of the mean time from arrival to completion.

    The larger of two bounds: shortest remaining work first on one machine as fast as all GPUs, with the
    least GPU-seconds of each member; and each member alone on its fastest number of GPUs.
    """
    if not jobs:
        return 0.0
    alone = math.fsum(least_s(workload, gpus) for _, workload in jobs)
    return max(alone, _srpt_total([(at, _least_work(c, gpus) / gpus) for at, c in jobs])) / len(jobs)


def least_s(workload: Workload, gpus: int) -> float:
    """Return the seconds of a member's work on the fastest number of up to `gpus` GPUs."""
    return workload.samples_left / max(rate for m, rate in workload.highest_rates.items() if m <= gpus)


def _least_work(workload: Workload, gpus: int) -> float:
    rates = workload.highest_rates.items()
    return min(device_time(m, workload.least_busy) * workload.samples_left / r for m, r in rates if m <= gpus)


def device_time(gpus: int, busy: float) -> float:
    """Return the device time per second that a member takes on some GPUs: on one only what keeps it busy."""
    return busy if gpus == 1 else gpus


def _srpt_total(jobs: Sequence[tuple[float, float]]) -> float:
    """Return the total time in the system under shortest remaining processing time first."""
    waiting: list[tuple[float, float]] = []
    now, total = 0.0, 0.0
    arrivals = sorted(jobs)
    for number, (at, work) in enumerate(arrivals):
        now = max(now, at)
        heapq.heappush(waiting, (work, at))
        until = arrivals[number + 1][0] if number + 1 < len(arrivals) else math.inf
        while waiting and now < until:
            left, arrived = heapq.heappop(waiting)
            if now + left > until:
                heapq.heappush(waiting, (left - (until - now), arrived))
                now = until
            else:
                now += left
                total += now - arrived
    return total


@dataclass(frozen=True)
class Envelope:
    """Points of a concave increasing curve from (0, 0 samples/s) to the highest rate.

    Parameters
    ----------
    gpus : tuple of int
        GPUs of each point.
    busy : float
        Share of the time for which the member keeps one GPU busy.
    """

    gpus: tuple[int, ...]
    rates: tuple[float, ...]
    busy: float = 1.0

    @property
    def highest(self) -> float:
        """Highest rate, in samples/s."""
        return self.rates[-1]

    def corner_above(self, rate: float) -> int:
        """Return the index of the first corner, from 1 on, with a rate of at least `rate`."""
        return min(max(bisect_left(self.rates, rate), 1), len(self.rates) - 1)

    def gpus_for(self, rate: float) -> tuple[float, float]:
        """Return g(rate) in device time per second and its slope, for rates up to the highest."""
        at = self.corner_above(rate)
        low, high = (device_time(self.gpus[corner], self.busy) for corner in (at - 1, at))
        slope = (high - low) / (self.rates[at] - self.rates[at - 1])
        return low + slope * (rate - self.rates[at - 1]), slope


def envelope_of(rates: Mapping[int, float], limit: int, busy: float = 1.0) -> Envelope:
    """Return the envelope of a rate curve on up to `limit` GPUs, cached by the identity of the mapping."""
    return _envelope(Identity(rates), limit, busy)


class WaitingMember(NamedTuple):
    """A member in a backlog.

    Parameters
    ----------
    seconds : float
        Time on the first corner of its envelope, with its start-up.
    place : int
        Place among members that take equally long; the earliest has the last place.
    gpu_s : float
        Device time of its work on that corner, in GPU-seconds.
    least_s : float
        Time at its highest rate, without start-up.
    """

    seconds: float
    place: int
    gpu_s: float
    least_s: float
    workload: Workload
    envelope: Envelope


class Backlog:
    """Members without GPUs, by their time on the first corners of their envelopes on up to `gpus` GPUs.

    Below its first corner a member needs GPUs in proportion to its rate. So the GPUs of all members that
    stay below theirs follow from one sum, which is kept up to date as members come and go.
    """

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self._members: list[WaitingMember] = []
        self._sums = [0.0]
        self._least_s: list[float] = []

    def add(self, number: int, workload: Workload) -> None:
        """Add a member; of equally long ones, the one with the lowest number counts as the longest."""
        member = self._member(number, workload)
        at = bisect_left(self._members, member)
        self._members.insert(at, member)
        insort(self._least_s, member.least_s)
        del self._sums[at + 1 :]

    def remove(self, number: int, workload: Workload) -> None:
        """Remove a member."""
        member = self._member(number, workload)
        at = bisect_left(self._members, member)
        del self._members[at], self._sums[at + 1 :]
        del self._least_s[bisect_left(self._least_s, member.least_s)]

    def _member(self, number: int, workload: Workload) -> WaitingMember:
        envelope = envelope_of(workload.rates, self.gpus, workload.gpu_share)
        left, gpus, rate = workload.samples_left, envelope.gpus[1], envelope.rates[1]
        seconds = (left + rate * workload.startup_s) / rate
        gpu_s = left * device_time(gpus, workload.gpu_share) / rate
        return WaitingMember(seconds, -number, gpu_s, left / envelope.highest, workload, envelope)

    def longer_than(self, seconds: float) -> list[WaitingMember]:
        """Return the members that take longer."""
        return self._members[self._within(seconds) :]

    def others(self, seconds: float) -> Iterator[WaitingMember]:
        """Yield the members that take no longer, the longest first."""
        return islice(reversed(self._members), len(self._members) - self._within(seconds), None)

    def gpu_s(self, seconds: float) -> float:
        """Return the GPU-seconds of the members that take no longer."""
        at = self._within(seconds)
        while len(self._sums) <= at:
            self._sums.append(self._sums[-1] + self._members[len(self._sums) - 1].gpu_s)
        return self._sums[at]

    @property
    def least_s(self) -> float:
        """Longest time of any of them at its highest rate, in seconds."""
        return self._least_s[-1] if self._least_s else 0.0

    def _within(self, seconds: float) -> int:
        return bisect_right(self._members, seconds, key=attrgetter("seconds"))


def fluid_time(
    works: Sequence[tuple[float, Envelope]], gpus: int, near_s: float = 0.0, backlog: Backlog | None = None
) -> float:
    """Return the least T in seconds with sum_i g_i(W_i / T) <= `gpus`; 0 if nothing is left to do.

    The sum is convex and piecewise linear in 1/T, so that Newton's method converges to its root from above
    in a few steps.

    Parameters
    ----------
    works : sequence of (W_i, Envelope)
        Samples left, above 0.
    near_s : float
        Initial estimate of T, which only saves steps.
    backlog : Backlog or None
        More members.
    """
    backlog = backlog or Backlog(gpus)
    least_s = max((work / envelope.highest for work, envelope in works), default=0.0)
    least_s = max(least_s, backlog.least_s)
    if not least_s:
        return 0.0
    pace = fastest = 1 / least_s
    if near_s > 0:
        # The sum is convex in 1/T: a Newton step from either side never lands below the root.
        pace = min(_newton(works, backlog, gpus, min(1 / near_s, fastest)), fastest)
    for _ in range(NEWTON_STEPS):
        lower = _newton(works, backlog, gpus, pace)
        # Near the root, rounding errors move the result up and down.
        if lower >= pace * (1 - 1e-13):
            break
        pace = lower
    return 1 / pace


def _newton(works: Sequence[tuple[float, Envelope]], backlog: Backlog, gpus: int, pace: float) -> float:
    """Return the 1/T at which the tangent at `pace` needs all GPUs; it is never below the root."""
    slope = backlog.gpu_s(1 / pace)
    needed = slope * pace
    longer = ((one.workload.samples_left, one.envelope) for one in backlog.longer_than(1 / pace))
    for work, envelope in chain(works, longer):
        more, per_rate = envelope.gpus_for(work * pace)
        needed += more
        slope += per_rate * work
    return pace - (needed - gpus) / slope


class Identity(Generic[Value]):
    """Value as a cache key, equal to itself only."""

    __slots__ = ("value",)

    def __init__(self, value: Value) -> None:
        self.value = value

    def __hash__(self) -> int:
        # The key holds the value itself, so its id is not given to another object while it is cached.
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value


@lru_cache(maxsize=1 << 14)
def _envelope(key: Identity[Mapping[int, float]], limit: int, busy: float) -> Envelope:
    corners: list[tuple[int, float]] = [(0, 0.0)]
    for gpus in sorted(m for m in key.value if m <= limit):
        corner = (gpus, key.value[gpus])
        # Upper convex hull, as in Andrew's monotone chain.
        while len(corners) > 1 and _slope(corners[-1], corner, busy) > _slope(corners[-2], corners[-1], busy):
            corners.pop()
        if corner[1] > corners[-1][1]:
            corners.append(corner)
    return Envelope(tuple(gpus for gpus, _ in corners), tuple(rate for _, rate in corners), busy)


def _slope(left: tuple[int, float], right: tuple[int, float], busy: float) -> float:
    return (right[1] - left[1]) / (device_time(right[0], busy) - device_time(left[0], busy))
