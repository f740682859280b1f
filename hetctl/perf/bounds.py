"""Lower bounds of schedules. On GPUs of several types, all count as the fastest for each member."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from hetctl.model.workload import Workload
from hetctl.perf.fluid_bound import envelope_of, fluid_time


def fluid_bound(workloads: Sequence[Workload], gpus: int) -> float:
    """Return the least T in seconds with sum_i g_i(W_i / T) <= `gpus`; 0 if nothing is left to do.

    W_i are the samples left and g_i(q) the GPUs needed for rate q on the concave envelope of the member's
    rate curve, including time-sharing below one GPU: members may be resized arbitrarily at no cost.
    Start-up, evaluation and checkpoints are ignored, so real schedules take longer.
    """
    works = [(c.samples_left, envelope_of(c.highest_rates, gpus)) for c in workloads if c.samples_left > 0]
    return fluid_time(works, gpus)


def makespan_bound(jobs: Sequence[tuple[float, Workload]], gpus: int) -> float:
    """Return a lower bound in seconds from 0 of schedules of members that arrive over time.

    Parameters
    ----------
    jobs : sequence of (seconds, Workload)
        Members with their arrival times.
    """
    soonest = max((at + _least_s(workload, gpus) for at, workload in jobs), default=0.0)
    return max(fluid_bound([workload for _, workload in jobs], gpus), soonest)


def mean_jct_bound(jobs: Sequence[tuple[float, Workload]], gpus: int) -> float:
    """Return a lower bound in seconds of the mean time from arrival to completion.

    The larger of two bounds: shortest remaining work first on one machine as fast as all GPUs, with the
    least GPU-seconds of each member; and each member alone on its fastest number of GPUs.
    """
    if not jobs:
        return 0.0
    alone = math.fsum(_least_s(workload, gpus) for _, workload in jobs)
    return max(alone, _srpt_total([(at, _least_work(c, gpus) / gpus) for at, c in jobs])) / len(jobs)


def _least_s(workload: Workload, gpus: int) -> float:
    return workload.samples_left / max(rate for m, rate in workload.highest_rates.items() if m <= gpus)


def _least_work(workload: Workload, gpus: int) -> float:
    return min(m * workload.samples_left / rate for m, rate in workload.highest_rates.items() if m <= gpus)


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
