"""Resizing by gain: repeated increases for the member that gains most, and their placement on nodes."""

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

NextSize = Callable[[int], int]
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


def candidates_of(request: Request) -> list[ResizeCandidate]:
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


def allot(
    candidates: Sequence[ResizeCandidate], nodes: Sequence[Node], next_size: NextSize
) -> dict[str, int]:
    """Return GPUs by member: the least for each while GPUs are left, then increases for the largest gain.

    Members in training first grow to the number that they should keep: none is made smaller for the
    gain of others, but only so that all get their least number. No member overtakes one whose least number
    is not free. A member stays as it is if its next increase gains nothing, or if the GPUs for it are not
    free on as few nodes as the member then needs. Fixed members are left out.
    """
    capacity = NodeCapacity(nodes)
    growing = _beginning(candidates, capacity)
    counts = {candidate.name: candidate.least for candidate in growing}
    kept = {candidate.name: _kept(candidate, next_size) for candidate in growing}
    _grow(
        [candidate for candidate in growing if kept[candidate.name] > candidate.least],
        counts,
        capacity,
        next_size,
        kept,
    )
    _grow(growing, counts, capacity, next_size, {})
    return counts


def _beginning(candidates: Sequence[ResizeCandidate], capacity: NodeCapacity) -> list[ResizeCandidate]:
    """Return the members that get their least number of GPUs."""
    growing: list[ResizeCandidate] = []
    for candidate in candidates:
        if candidate.fixed:
            continue
        if capacity.left and capacity.change(0, candidate.least):
            growing.append(candidate)
        elif not candidate.holds and candidate.least == candidate.workload.min_gpus:
            # Members of one GPU would take each that becomes free, and a wide member would come last.
            break
    return growing


def _kept(candidate: ResizeCandidate, next_size: NextSize) -> int:
    """Return the best number of GPUs up to the present one, the time of a restart included."""
    best = gpus = candidate.least
    while (gpus := next_size(gpus)) <= candidate.holds and gpus in candidate.rates:
        if candidate.seconds(gpus) <= candidate.seconds(best):
            best = gpus
    return best


def _grow(
    candidates: Sequence[ResizeCandidate],
    counts: dict[str, int],
    capacity: NodeCapacity,
    next_size: NextSize,
    kept: Mapping[str, int],
) -> None:
    """Take the increase of the largest gain repeatedly: up to `kept` in any case, beyond it if it gains."""

    def following(order: int) -> list[tuple[float, int, int]]:
        candidate = candidates[order]
        before = counts[candidate.name]
        after = next_size(before)
        if after not in candidate.rates or after > kept.get(candidate.name, after):
            return []
        gain = candidate.gain(before, after)
        # The number breaks ties by arrival, and keeps the heap from comparing anything else.
        return [(-gain, order, after)] if gain > 0 or candidate.name in kept else []

    increases = [entry for order in range(len(candidates)) for entry in following(order)]
    heapq.heapify(increases)
    while increases and capacity.left:
        _, order, after = heapq.heappop(increases)
        name = candidates[order].name
        # An increase that does not fit is dropped for good: the capacity only shrinks.
        if capacity.change(counts[name], after):
            counts[name] = after
            for entry in following(order):
                heapq.heappush(increases, entry)


def give(request: Request, counts: Mapping[str, int], next_size: NextSize) -> Decision:
    """Place members; one that does not fit goes back by as many increases as needed."""
    workloads = [*request.workloads, *(held.workload for held in request.held)]
    least = {workload.name: workload.min_gpus for workload in workloads}
    holds = {held.workload.name: held.allocation.gpus for held in request.held}
    while True:
        decision, given = place_members(request, counts)
        # A member for which nothing is left waits: it is not among those given.
        short = {
            name: _reached(gpus, next_size, least[name])
            for name, gpus in given.items()
            if gpus < counts.get(name, gpus)
        }
        # A member that falls back to what it holds was placed as if it moved: it should keep its GPUs.
        if all(given[name] == gpus != holds.get(name) for name, gpus in short.items()):
            return decision
        counts = {**counts, **short}


def _reached(gpus: int, next_size: NextSize, least: int) -> int:
    """Return the largest number up to `gpus` that increases from `least` reach."""
    reached = least
    while next_size(reached) <= gpus:
        reached = next_size(reached)
    return reached


def by_gain(name: str, next_size: NextSize, choose: Choose) -> Planner:
    """Return the elastic planner that uses `choose`, with increases from the least number of GPUs."""

    def decide(request: Request) -> Decision:
        return give(request, choose(candidates_of(request), movable_nodes(request)), next_size)

    def reasons(request: Request, decision: Decision) -> dict[str, str]:
        return explain(request, decision, candidates_of(request), next_size)

    return Planner(name, "elastic", decide, reasons=reasons)


def explain(
    request: Request, decision: Decision, candidates: Sequence[ResizeCandidate], next_size: NextSize
) -> dict[str, str]:
    """Return for each member with GPUs the gain of its next increase, and the members that wait."""
    given = gpus_after(request, decision)
    words = {
        candidate.name: _holds(candidate, given[candidate.name], next_size)
        for candidate in candidates
        if candidate.name in given
    }
    waiting = [candidate.name for candidate in candidates if candidate.name not in given]
    return words | {
        name: f"waits, {ahead} before it: {len(given)} members have a GPU each or more"
        for ahead, name in enumerate(waiting)
    }


def gpus_after(request: Request, decision: Decision) -> dict[str, int]:
    """Return the GPUs by member after a decision is carried out."""
    return {name: given.gpus for name, given in allocations_after(request, decision).items()}


def _holds(candidate: ResizeCandidate, gpus: int, next_size: NextSize) -> str:
    count = gpu_count(gpus)
    if candidate.fixed:
        return f"{count}: it can be neither stopped nor moved"
    if next_size(gpus) not in candidate.rates:
        return f"{count}: no rate on {next_size(gpus)} is known"
    gain_s = candidate.gain(gpus, next_size(gpus))
    if gain_s <= 0:
        return f"{count}: {next_size(gpus)} would save no time"
    return f"{count}: {next_size(gpus)} would save {gain_s:.3g} s for each GPU more"
