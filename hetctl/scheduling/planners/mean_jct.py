"""hetctl's own method: GPUs for a small mean completion time.

Equation 6 of Capes et al. gives GPUs where they save most seconds: to the members with most work left.
But the sum of completion times falls most if short members end first and free their GPUs. So if there
are more members than GPUs, those with the least work left come first, and a saved second counts less, the
more work its member has left. Members grow from one corner of their envelope to the next, since GPUs
between two corners are less efficient than at either.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from hetctl.perf.bounds import envelope_of
from hetctl.perf.rate_extrapolation import gpu_count
from hetctl.scheduling.planners.base import Decision, Request, gpus_after
from hetctl.scheduling.planners.doubling import ResizeCandidate, candidates_of
from hetctl.scheduling.planners.placement import NodeCapacity, place_members

POWER = 1.5
"""Exponent of the work left by which saved seconds are divided. At 1 only a member's scaling would
count; the best mean times on Capes' Table 3 are between 1.25 and 1.6."""


def decide(request: Request) -> Decision:
    """Give each member its fewest GPUs, the least work first, then let the members grow that gain most."""
    jobs = _by_work(request)
    capacity = NodeCapacity(request.all_nodes)
    for job in jobs:
        if job.fixed:
            capacity.change(0, job.holds)
    growing = [job for job in jobs if not job.fixed and capacity.left and capacity.change(0, job.least)]
    counts = {job.name: job.least for job in growing}
    _grow(growing, counts, capacity, request.gpus)
    return place_members(request, counts)[0]


def _by_work(request: Request) -> list[ResizeCandidate]:
    """Return the members by their work left; overtaking one in training has to pay for its stop."""

    def key(job: ResizeCandidate) -> float:
        # Without the cost of the interruption, members of about equal work would replace each other in turn.
        return _work(job, request.gpus) + (0.0 if job.holds else job.workload.interruption_s)

    return sorted(candidates_of(request), key=key)


def _work(job: ResizeCandidate, limit: int) -> float:
    """Return the least GPU-seconds of the work left."""
    envelope = envelope_of(job.rates, limit)
    # At least one sample: gains are divided by the work.
    return max(job.workload.samples_left, 1.0) * envelope.gpus[1] / envelope.rates[1]


def _next_corner(job: ResizeCandidate, gpus: int, limit: int) -> int:
    """Return the GPUs of the first corner with more than `gpus`; 0 after the last."""
    return next((corner for corner in envelope_of(job.rates, limit).gpus if corner > gpus), 0)


def _grow(jobs: list[ResizeCandidate], counts: dict[str, int], capacity: NodeCapacity, limit: int) -> None:
    queue: list[tuple[float, int, int]] = []

    def add(order: int, gpus: int) -> None:
        """Add an increase to the queue (largest gain first) if it gains anything."""
        job = jobs[order]
        if gpus and (gain := job.gain(counts[job.name], gpus) / math.pow(_work(job, limit), POWER)) > 0:
            heapq.heappush(queue, (-gain, order, gpus))

    for order, job in enumerate(jobs):
        add(order, _next_corner(job, job.least, limit))
    while queue and capacity.left:
        _, order, gpus = heapq.heappop(queue)
        job, before = jobs[order], counts[jobs[order].name]
        if capacity.change(before, gpus):
            counts[job.name] = gpus
            add(order, _next_corner(job, gpus, limit))
        elif gpus > before + 1:
            # The next corner does not fit on the nodes; half of the step may.
            add(order, (before + gpus) // 2)


def reasons(request: Request, decision: Decision) -> Mapping[str, str]:
    """Return the gain of the next corner for members with GPUs, and the place in the queue for the others."""
    given = gpus_after(request, decision)
    return {
        job.name: _reason(job, given.get(job.name, 0), ahead, request.gpus)
        for ahead, job in enumerate(_by_work(request))
    }


def _reason(job: ResizeCandidate, gpus: int, ahead: int, limit: int) -> str:
    work = f"{_work(job, limit):.0f} GPU-seconds"
    if not gpus:
        return f"waits: {ahead} members have less work left than its {work}"
    count = f"{gpu_count(gpus)} for {work} of work left"
    more = _next_corner(job, gpus, limit)
    if not more:
        return f"{count}: it can use no more"
    saved_s = job.seconds(gpus) - job.seconds(more)
    return f"{count}: {more} would save {max(saved_s, 0.0):.0f} s, which others need more"
