"""Resizing by gain: repeated steps for the member that gains most, and their placement on nodes."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetctl.model.site import Node
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Decision, Planner, Request, allocations_after, gpu_count
from hetctl.scheduling.planners.capacity import NodeCapacity
from hetctl.scheduling.planners.placement import place_members

Step = Callable[[int], int]
"""Function from a number of GPUs to the next larger one to try."""


@dataclass(frozen=True)
class ResizeCandidate:
    """A member with its rates, its present GPUs and the limits of a resize.

    Parameters
    ----------
    rates : mapping of int to float
        Rates by number of GPUs, in samples/s, that the planner uses.
    holds : int
        GPUs that it holds now.
    fixed : bool
        True if it keeps them.
    least : int
        Smallest number of GPUs that it can get.
    """

    workload: Workload
    rates: Mapping[int, float]
    holds: int = 0
    fixed: bool = False
    least: int = 1

    @property
    def name(self) -> str:
        """Name of the member."""
        return self.workload.name

    def seconds(self, gpus: int) -> float:
        """Return t_j = Q_j / f(w_j), plus a restart if it now holds another number of GPUs."""
        # A waiting member starts in any case, so only a change of held GPUs costs a restart.
        restart_s = self.workload.interruption_s if self.holds not in (0, gpus) else 0.0
        return self.workload.samples_left / self.rates[gpus] + restart_s

    def gain(self, before: int, after: int) -> float:
        """Return the seconds saved per added GPU (Capes et al., Equation 6)."""
        return (self.seconds(before) - self.seconds(after)) / (after - before)


Choose = Callable[[Sequence[ResizeCandidate], Sequence[Node]], dict[str, int]]
"""Function from members, and nodes with the available GPUs, to GPUs by member."""


def jobs_of(request: Request) -> list[ResizeCandidate]:
    """Return all members: first those in training, then the waiting ones by arrival."""
    held = [
        ResizeCandidate(h.workload, h.workload.rates, h.allocation.gpus, h.fixed, h.workload.min_gpus)
        for h in request.held
    ]
    return held + [ResizeCandidate(c, c.rates, least=c.min_gpus) for c in request.workloads]


def movable_nodes(request: Request) -> list[Node]:
    """Return nodes with the GPUs that are free or held by members that can be moved."""
    gpus: defaultdict[str, list[int]] = defaultdict(list)
    for node in request.nodes:
        gpus[node.name].extend(node.gpus)
    for held in request.held:
        for part in () if held.fixed else held.allocation.placement:
            gpus[part.node].extend(part.gpus)
    return [Node(name, tuple(here)) for name, here in gpus.items()]


def allot(jobs: Sequence[ResizeCandidate], nodes: Sequence[Node], step: Step) -> dict[str, int]:
    """Return GPUs by member: the least for each while GPUs are left, then steps for the largest gain.

    Members in training first grow to the number that they should keep: none is made smaller for the
    gain of others, but only so that all get their least number. No member overtakes one whose least number
    is not free. A member stays as it is if its next step gains nothing, or if the GPUs for it are not free on
    as few nodes as the member then needs. Fixed members are left out.
    """
    capacity = NodeCapacity(nodes)
    growing = _beginning(jobs, capacity)
    counts = {job.name: job.least for job in growing}
    kept = {job.name: _kept(job, step) for job in growing}
    _grow([job for job in growing if kept[job.name] > job.least], counts, capacity, step, kept)
    _grow(growing, counts, capacity, step, {})
    return counts


def _beginning(jobs: Sequence[ResizeCandidate], capacity: NodeCapacity) -> list[ResizeCandidate]:
    """Return the members that get their least number of GPUs."""
    growing: list[ResizeCandidate] = []
    for job in jobs:
        if job.fixed:
            continue
        if capacity.left and capacity.change(0, job.least):
            growing.append(job)
        elif not job.holds and job.least == job.workload.min_gpus:
            # Members of one GPU would take each that becomes free, and a wide member would come last.
            break
    return growing


def _kept(job: ResizeCandidate, step: Step) -> int:
    """Return the best number of GPUs up to the present one, the time of a restart included."""
    best = gpus = job.least
    while (gpus := step(gpus)) <= job.holds and gpus in job.rates:
        if job.seconds(gpus) <= job.seconds(best):
            best = gpus
    return best


def _grow(
    jobs: Sequence[ResizeCandidate],
    counts: dict[str, int],
    capacity: NodeCapacity,
    step: Step,
    kept: Mapping[str, int],
) -> None:
    """Take the step of the largest gain repeatedly: up to `kept` in any case, beyond it if it gains."""

    def following(order: int) -> list[tuple[float, int, int]]:
        job = jobs[order]
        before = counts[job.name]
        after = step(before)
        if after not in job.rates or after > kept.get(job.name, after):
            return []
        gain = job.gain(before, after)
        # The number breaks ties by arrival, and keeps the heap from comparing anything else.
        return [(-gain, order, after)] if gain > 0 or job.name in kept else []

    steps = [entry for order in range(len(jobs)) for entry in following(order)]
    heapq.heapify(steps)
    while steps and capacity.left:
        _, order, after = heapq.heappop(steps)
        name = jobs[order].name
        # A step that does not fit is dropped for good: the capacity only shrinks.
        if capacity.change(counts[name], after):
            counts[name] = after
            for entry in following(order):
                heapq.heappush(steps, entry)


def give(request: Request, counts: Mapping[str, int], step: Step) -> Decision:
    """Place members; one that does not fit goes back by as many steps as needed."""
    workloads = [*request.workloads, *(held.workload for held in request.held)]
    least = {workload.name: workload.min_gpus for workload in workloads}
    holds = {held.workload.name: held.allocation.gpus for held in request.held}
    while True:
        decision, given = place_members(request, counts)
        # A member for which nothing is left waits: it is not among those given.
        short = {
            name: _reached(gpus, step, least[name])
            for name, gpus in given.items()
            if gpus < counts.get(name, gpus)
        }
        # A member that falls back to what it holds was placed as if it moved: it should keep its GPUs.
        if all(given[name] == gpus != holds.get(name) for name, gpus in short.items()):
            return decision
        counts = {**counts, **short}


def _reached(gpus: int, step: Step, least: int) -> int:
    """Return the largest number up to `gpus` that steps from `least` reach."""
    reached = least
    while step(reached) <= gpus:
        reached = step(reached)
    return reached


def by_gain(name: str, step: Step, choose: Choose) -> Planner:
    """Return the elastic planner that uses `choose`, with steps from the least number of GPUs."""

    def decide(request: Request) -> Decision:
        return give(request, choose(jobs_of(request), movable_nodes(request)), step)

    def reasons(request: Request, decision: Decision) -> dict[str, str]:
        return explain(request, decision, jobs_of(request), step)

    return Planner(name, "elastic", decide, reasons=reasons)


def explain(
    request: Request, decision: Decision, jobs: Sequence[ResizeCandidate], step: Step
) -> dict[str, str]:
    """Return for each member with GPUs the gain of its next step, and the members that wait."""
    given = gpus_after(request, decision)
    words = {job.name: _holds(job, given[job.name], step) for job in jobs if job.name in given}
    waiting = [job.name for job in jobs if job.name not in given]
    return words | {
        name: f"waits, {ahead} before it: {len(given)} members have a GPU each or more"
        for ahead, name in enumerate(waiting)
    }


def gpus_after(request: Request, decision: Decision) -> dict[str, int]:
    """Return the GPUs by member after a decision is carried out."""
    return {name: given.gpus for name, given in allocations_after(request, decision).items()}


def _holds(job: ResizeCandidate, gpus: int, step: Step) -> str:
    count = gpu_count(gpus)
    if job.fixed:
        return f"{count}: it can be neither stopped nor moved"
    if step(gpus) not in job.rates:
        return f"{count}: no rate on {step(gpus)} is known"
    gain_s = job.gain(gpus, step(gpus))
    if gain_s <= 0:
        return f"{count}: {step(gpus)} would save no time"
    return f"{count}: {step(gpus)} would save {gain_s:.3g} s for each GPU more"
