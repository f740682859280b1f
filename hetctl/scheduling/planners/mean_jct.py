"""hetctl's own method: GPUs for a small mean completion time.

Equation 6 of Capes et al. gives GPUs to the members for which they save most seconds, which are those
with most work left. But the sum of completion times falls most if short members end first and free
their GPUs. So the members with the least work left come first if there are more members than GPUs, and
the seconds that a GPU saves a member count less, the more work it has left. Members grow from one
corner of their envelope to the next, since GPUs between two corners are less efficient than at either.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

from hetctl.model.workload import Workload
from hetctl.perf.bounds import Envelope, envelope_of
from hetctl.scheduling.planners.base import Decision, Request, allocations_after, gpu_count
from hetctl.scheduling.planners.placement import NodeCapacity, place_members

POWER = 1.5
"""Exponent of the work left by which saved seconds are divided. At 1 only a member's scaling would
count; the best mean times on Capes' Table 3 are between 1.25 and 1.6."""


@dataclass
class JctCandidate:
    """A member, the GPUs that it holds now (`holds`) and those chosen for it (`gpus`)."""

    workload: Workload
    envelope: Envelope
    holds: int
    fixed: bool
    gpus: int = 0

    @property
    def work(self) -> float:
        """Least GPU-seconds of the work left."""
        # At least one sample: gains are divided by the work.
        return max(self.workload.samples_left, 1.0) * self.envelope.gpus[1] / self.envelope.rates[1]

    def seconds(self, gpus: int) -> float:
        """Return the seconds left on `gpus` GPUs, the time of a restart included."""
        restart_s = self.workload.interruption_s if self.holds not in (0, gpus) else 0.0
        return self.workload.samples_left / self.workload.rates[gpus] + restart_s

    def next_corner(self) -> int:
        """Return the GPUs of the next corner; 0 after the last."""
        return next((gpus for gpus in self.envelope.gpus if gpus > self.gpus), 0)

    def gain(self, gpus: int) -> float:
        """Return the seconds saved per added GPU, divided by the work left to the power `POWER`."""
        saved_s = self.seconds(self.gpus) - self.seconds(gpus)
        return saved_s / (gpus - self.gpus) / math.pow(self.work, POWER)


def decide(request: Request) -> Decision:
    """Give each member its fewest GPUs, the least work first, then let the members grow that gain most."""
    jobs = _jobs(request)
    capacity = NodeCapacity(request.all_nodes)
    for job in jobs:
        if job.fixed and capacity.change(0, job.holds):
            job.gpus = job.holds
    growing = [job for job in jobs if not job.fixed]
    for job in growing:
        if capacity.left and capacity.change(0, job.workload.min_gpus):
            job.gpus = job.workload.min_gpus
    _grow([job for job in growing if job.gpus], capacity)
    return place_members(request, {job.workload.name: job.gpus for job in jobs})[0]


def _jobs(request: Request) -> list[JctCandidate]:
    """Return the members by their work left; one in training is overtaken only if that pays for the stop."""
    jobs = [
        JctCandidate(h.workload, envelope_of(h.workload.rates, request.gpus), h.allocation.gpus, h.fixed)
        for h in request.held
    ]
    jobs += [JctCandidate(c, envelope_of(c.rates, request.gpus), 0, False) for c in request.workloads]
    # Without the cost of the interruption, members of about equal work would replace each other in turn.
    return sorted(jobs, key=lambda job: job.work + (0.0 if job.holds else job.workload.interruption_s))


def _grow(jobs: list[JctCandidate], capacity: NodeCapacity) -> None:
    queue = [entry for order, job in enumerate(jobs) for entry in _growth(job, order)]
    heapq.heapify(queue)
    while queue and capacity.left:
        _, order, gpus = heapq.heappop(queue)
        job = jobs[order]
        if capacity.change(job.gpus, gpus):
            job.gpus = gpus
            for entry in _growth(job, order):
                heapq.heappush(queue, entry)
        elif gpus > job.gpus + 1:
            # The next corner does not fit on the nodes; half of the step may.
            half = (job.gpus + gpus) // 2
            if job.gain(half) > 0:
                heapq.heappush(queue, (-job.gain(half), order, half))


def _growth(job: JctCandidate, order: int) -> list[tuple[float, int, int]]:
    """Return the next corner as an entry of the queue (largest gain first), or none if it gains nothing."""
    gpus = job.next_corner()
    gain = job.gain(gpus) if gpus else 0.0
    return [(-gain, order, gpus)] if gain > 0 else []


def reasons(request: Request, decision: Decision) -> Mapping[str, str]:
    """Return the gain of the next corner for members with GPUs, and the place in the queue for the others."""
    given = allocations_after(request, decision)
    words = {}
    for ahead, job in enumerate(_jobs(request)):
        job.gpus = given[job.workload.name].gpus if job.workload.name in given else 0
        words[job.workload.name] = _reason(job, ahead)
    return words


def _reason(job: JctCandidate, ahead: int) -> str:
    if not job.gpus:
        return f"waits: {ahead} members have less work left than its {job.work:.0f} GPU-seconds"
    count = f"{gpu_count(job.gpus)} for {job.work:.0f} GPU-seconds of work left"
    more = job.next_corner()
    if not more:
        return f"{count}: it can use no more"
    saved_s = job.seconds(job.gpus) - job.seconds(more)
    return f"{count}: {more} would save {max(saved_s, 0.0):.0f} s, which others need more"
