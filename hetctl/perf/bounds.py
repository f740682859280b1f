"""What no schedule can beat."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetctl.core.profile import Candidate

HALVINGS = 60


def fluid_bound(candidates: Sequence[Candidate], gpus: int) -> float:
    """Return the least T in seconds with sum_i g_i(W_i / T) <= `gpus`; 0 if nothing is left to do.

    W_i are the samples left and g_i(q) the GPUs that rate q takes on the concave envelope of the
    member's rate curve, time-sharing below one GPU included: members may be resized at will and
    for nothing. Start-up, evaluation and checkpoints are left out, so real schedules take longer.
    """
    jobs = [
        (candidate.samples_left, _envelope(candidate.rates, gpus))
        for candidate in candidates
        if candidate.samples_left > 0
    ]
    low = max((work / envelope.rates[-1] for work, envelope in jobs), default=0.0)
    if _fits(jobs, low, gpus):
        return low
    high = 2 * low
    while not _fits(jobs, high, gpus):
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(jobs, middle, gpus) else (middle, high)
    return low


@dataclass(frozen=True)
class _Envelope:
    """Corners of a concave rising curve from the origin to the highest rate."""

    gpus: tuple[int, ...]
    rates: tuple[float, ...]

    def gpus_for(self, rate: float) -> float:
        """Return g_i(rate), for rates up to the highest."""
        at = min(max(bisect_left(self.rates, rate), 1), len(self.rates) - 1)
        low, high = self.rates[at - 1], self.rates[at]
        return self.gpus[at - 1] + (self.gpus[at] - self.gpus[at - 1]) * (rate - low) / (high - low)


def _envelope(rates: Mapping[int, float], limit: int) -> _Envelope:
    corners = [(0, 0.0)]
    for gpus in sorted(m for m in rates if m <= limit):
        corner = (gpus, rates[gpus])
        while len(corners) > 1 and _slope(corners[-1], corner) >= _slope(corners[-2], corners[-1]):
            corners.pop()
        if corner[1] > corners[-1][1]:
            corners.append(corner)
    return _Envelope(tuple(gpus for gpus, _ in corners), tuple(rate for _, rate in corners))


def _slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def _fits(jobs: Sequence[tuple[float, _Envelope]], seconds: float, gpus: int) -> bool:
    return math.fsum(envelope.gpus_for(work / seconds) for work, envelope in jobs) <= gpus


def makespan_bound(jobs: Sequence[tuple[float, Candidate]], gpus: int) -> float:
    """Return seconds from 0 in which no schedule can be done with members that arrive over time.

    Parameters
    ----------
    jobs : sequence of (seconds, Candidate)
        Each member with its arrival.
    """
    soonest = max((at + _least_s(candidate, gpus) for at, candidate in jobs), default=0.0)
    return max(fluid_bound([candidate for _, candidate in jobs], gpus), soonest)


def mean_jct_bound(jobs: Sequence[tuple[float, Candidate]], gpus: int) -> float:
    """Return the least mean time from arrival to completion that any schedule may have.

    The larger of two bounds: shortest remaining work first on one machine as fast as all GPUs,
    where each member takes its least GPU-seconds; and each member alone on the GPUs it likes best.
    """
    if not jobs:
        return 0.0
    alone = math.fsum(_least_s(candidate, gpus) for _, candidate in jobs)
    return max(alone, _srpt_total([(at, _least_work(c, gpus) / gpus) for at, c in jobs])) / len(jobs)


def _least_s(candidate: Candidate, gpus: int) -> float:
    return candidate.samples_left / max(rate for m, rate in candidate.rates.items() if m <= gpus)


def _least_work(candidate: Candidate, gpus: int) -> float:
    return min(m * candidate.samples_left / rate for m, rate in candidate.rates.items() if m <= gpus)


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
            left, came = heapq.heappop(waiting)
            if now + left > until:
                heapq.heappush(waiting, (left - (until - now), came))
                now = until
            else:
                now += left
                total += now - came
    return total
