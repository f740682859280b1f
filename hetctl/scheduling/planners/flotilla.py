"""FLEET-G and FLEET-L (Algorithms 1 to 4): members with similar rates train on all GPUs.

In FLEET-G, `FLOTILLA`, they train in rounds. In FLEET-L (section 4.3.3), `FLOTILLA_LOCAL`, GPUs that become
free are used again at once: the same greedy algorithm gives them remaining members, while all others
continue to train.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

from hetctl.model.plan import Placement
from hetctl.model.workload import Workload
from hetctl.perf.rate_extrapolation import gpu_count
from hetctl.scheduling.planners.base import Decision, Options, Planner, Request, allocation_on
from hetctl.scheduling.planners.packing import pack


def decide(request: Request) -> Decision:
    """Create a flotilla and place it (Algorithm 1, lines 4 and 5).

    A member that does not fit gets fewer GPUs, or waits; the GPUs that it leaves go to others, as the
    paper's remaining GPUs do.
    """
    free = request.free_gpus
    workloads = _affordable(request)
    if not workloads:
        return Decision()
    by_name = {workload.name: workload for workload in workloads}
    counts = create_flotilla(workloads, free, request.options)
    share_leftover(workloads, counts, free)
    counts = _fitting(counts, by_name, request)
    share_leftover(workloads, counts, free, _has_room(counts, request))
    placements, _ = _packed(counts, request)
    return Decision(tuple(allocation_on(by_name[name], placements[name]) for name in counts))


def _affordable(request: Request) -> list[Workload]:
    """Return the members for whose fewest GPUs enough are free."""
    return [workload for workload in request.workloads if workload.min_gpus <= request.free_gpus]


def create_flotilla(workloads: Sequence[Workload], gpus: int, options: Options) -> dict[str, int]:
    """Return the members of the flotilla with their GPUs (Algorithm 2, lines 1 to 11).

    The paper searches all workloads for the best next member again and again (Equation 3). As the
    number of GPUs left only falls, one pass over all choices, the nearest to the reference rate
    first, gives the same members. Ties: first in the ensemble's order, then fewest GPUs.

    Where the paper takes one GPU, a member takes the fewest on which it trains; they must be free.
    """
    fastest = max(workloads, key=lambda workload: workload.least_rate)
    reference = fastest.least_rate
    delta = options.relative_delta * reference if options.delta is None else options.delta
    counts, left = {fastest.name: fastest.min_gpus}, gpus - fastest.min_gpus
    choices = sorted(
        # Order and count settle ties, so that the same request gives the same flotilla.
        (abs(rate - reference), order, count, workload.name)
        for order, workload in enumerate(workloads)
        for count, rate in _near(workload, reference, delta, left)
    )
    for _, _, count, name in choices:
        if name not in counts and count <= left:
            counts[name] = count
            left -= count
    return counts


def share_leftover(
    workloads: Sequence[Workload],
    counts: dict[str, int],
    gpus: int,
    has_room: Callable[[str], bool] = lambda _: True,
) -> None:
    """Give the remaining GPUs to the slowest member, one by one (Algorithm 2, lines 12 to 16).

    A member gets no more at its limit, if one more would not make it faster, or if there is no room for it;
    GPUs that make no member faster stay idle.
    """
    rates = {workload.name: workload.rates for workload in workloads if workload.name in counts}
    left = gpus - sum(counts.values())
    slowest = [(rates[name][count], order, name) for order, (name, count) in enumerate(counts.items())]
    heapq.heapify(slowest)
    while left and slowest:
        rate, order, name = slowest[0]
        faster = rates[name].get(counts[name] + 1, 0.0)
        if faster > rate and has_room(name):
            counts[name] += 1
            left -= 1
            heapq.heapreplace(slowest, (faster, order, name))
        else:
            # Deviation from Algorithm 2, which gives all GPUs away: the member could not use them.
            heapq.heappop(slowest)


def _near(workload: Workload, reference: float, delta: float, limit: int) -> Iterator[tuple[int, float]]:
    """Yield the counts of GPUs whose rate is within `delta` of the reference rate.

    The search ends at the first rate above that window: beyond it, a member could only return to
    the window with more GPUs for no higher rate.
    """
    for count in range(workload.min_gpus, min(limit, workload.max_gpus) + 1):
        rate = workload.rates[count]
        if rate > reference + delta:
            return
        if rate >= reference - delta:
            yield count, rate


def _fitting(counts: dict[str, int], workloads: Mapping[str, Workload], request: Request) -> dict[str, int]:
    """Return counts that fit, by taking one GPU after another from each member that does not.

    A member with too few left to train waits for the next round.
    """
    while unplaced := _packed(counts, request)[1]:
        fewer = {name: count - (name in unplaced) for name, count in counts.items()}
        counts = {name: count for name, count in fewer.items() if count in workloads[name].rates}
    return counts


def _has_room(counts: Mapping[str, int], request: Request) -> Callable[[str], bool]:
    """Return a function that tells if a member can have one GPU more than `counts` gives it at the call."""
    too_many = set[int]()

    def has_room(name: str) -> bool:
        more = counts[name] + 1
        # Members with equally many GPUs are alike, and there is never more room than before.
        if more not in too_many and _packed({**counts, name: more}, request)[1]:
            too_many.add(more)
        return more not in too_many

    return has_room


def _packed(
    counts: Mapping[str, int], request: Request
) -> tuple[dict[str, tuple[Placement, ...]], tuple[str, ...]]:
    """Return the placements, and the members that do not fit without straddling nodes."""
    return pack(tuple(counts.items()), request.nodes, request.options.max_permutations, request.all_nodes)


def _local_reasons(request: Request, decision: Decision) -> dict[str, str]:
    """Return the rates of members that start, beside the reference rate."""
    if not decision.start:
        return {}
    fastest = max(_affordable(request), key=lambda workload: workload.least_rate)
    fewest = "one GPU" if fastest.min_gpus == 1 else gpu_count(fastest.min_gpus)
    beside = f"chosen by {fastest.name}, the fastest left, with {fastest.least_rate:.4g} on {fewest}"
    words = {
        a.member: f"{a.gpus} of {request.free_gpus} GPUs: {a.rate:.4g} samples/s, {beside}"
        for a in decision.start
    }
    waiting = (workload.name for workload in request.workloads if workload.name not in words)
    return words | dict.fromkeys(waiting, f"waits for freed GPUs: others are nearer to {fastest.name}")


FLOTILLA = Planner("flotilla", "global", decide, trains_as_group=True)
FLOTILLA_LOCAL = Planner(
    "flotilla-local", "local", decide, trains_as_group=True, reasons=_local_reasons, alpha=0.0
)
