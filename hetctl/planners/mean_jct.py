"""Ours: GPUs for a small mean completion time, the least work left first.

Equation 6 of Capes et al. gives GPUs to whom they save most seconds, which is who has most work left;
but the sum of completion times falls most if short members are done first, and make room. So who has
least work left comes first when there are more members than GPUs, and a doubling's gain counts less,
the longer the member is. With a weight of (work left)^-1 only the member's scaling would count; the
power here lies between that and shortest-first, and was the best of those tried on Capes' Table 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hetctl.perf.fluid import envelope_of
from hetctl.planners.base import Decision, Request
from hetctl.planners.doubling import twice
from hetctl.planners.elastic import Job, allot, explain, give, jobs_of, movable_nodes

POWER = 1.5


@dataclass(frozen=True)
class ShortFirst(Job):
    """A member whose gains count less, the longer it is.

    Parameters
    ----------
    work : float
        GPU-seconds that it takes at least.
    """

    work: float = 1.0

    def gain(self, before: int, after: int) -> float:
        """Return the seconds saved per GPU that is added, by the work left."""
        return super().gain(before, after) / math.pow(self.work, POWER)


def decide(request: Request) -> Decision:
    """Give a GPU to each, the shortest first, then double by weighted gain."""
    counts = allot(_shortest_first(request), movable_nodes(request), twice)
    return give(request, counts, twice)


def reasons(request: Request, decision: Decision) -> Mapping[str, str]:
    """Say of each member with GPUs what its next doubling would save, and who waits."""
    return explain(request, decision, _shortest_first(request), twice)


def _shortest_first(request: Request) -> list[Job]:
    """Return the members by the work left; who trains is overtaken only if stopping it pays."""
    jobs = [_job(job, request.gpus) for job in jobs_of(request)]
    jobs.sort(key=lambda job: job.work + (0.0 if job.holds else job.candidate.interruption_s))
    return [*jobs]


def _job(job: Job, gpus: int) -> ShortFirst:
    curve = envelope_of(job.rates, gpus)
    work = max(job.candidate.samples_left, 1.0) * curve.gpus[1] / curve.rates[1]
    return ShortFirst(job.candidate, job.rates, job.holds, job.fixed, work=work)
