"""Planners of one size: K GPUs for every member, first come, first served; or one for each, at random.

The first is `fixed-K` (Capes et al., section 7). The second is FLEET's Baseline (section 6.1), where each
free GPU gets a remaining member. A member that needs k GPUs gets k, and no other overtakes it while it waits.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import islice

from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.workload import Workload
from hetctl.perf.rate_extrapolation import gpu_count
from hetctl.scheduling.planners.base import Decision, Options, Planner, Request
from hetctl.scheduling.planners.packing import Item, pack


@lru_cache(maxsize=64)
def fixed(k: int) -> Planner:
    """Return the planner that gives every member `k` GPUs, at least 1.

    It gives fewer if a member's rates or the cluster end below `k`, and more if its rates begin above. The
    first member in the queue waits for its GPUs, and no other overtakes it.
    """
    decide, reasons = partial(in_turn, k=k), partial(_reasons, k=k)
    return Planner(f"fixed-{k}", "local", decide, reasons=reasons)


def in_turn(request: Request, k: int) -> Decision:
    """Start the longest part of the queue that fits, each member on `k` GPUs or as near as it may have."""
    queue = _affordable(request, k)
    placements, unplaced = _pack(queue, request)
    if unplaced:
        lengths = range(1, len(queue))
        longest = bisect_left(lengths, True, key=lambda length: bool(_pack(queue[:length], request)[1]))
        queue = queue[:longest]
        placements, _ = _pack(queue, request)
    return Decision(
        tuple(
            Allocation(name, gpus, DATA_PARALLEL, workload.rates[gpus], placements[name])
            for workload, (name, gpus) in zip(request.workloads, queue, strict=False)
        )
    )


def _affordable(request: Request, k: int) -> list[Item]:
    """Return the first workloads with their GPUs, as long as enough are free."""
    most, left = _most(request, k), request.free_gpus
    queue: list[Item] = []
    for workload in request.workloads:
        gpus = _wanted(workload, most)
        if gpus > left:
            break
        left -= gpus
        queue.append((workload.name, gpus))
    return queue


def _wanted(workload: Workload, most: int) -> int:
    return max(min(most, workload.max_gpus), workload.min_gpus)


def _most(request: Request, k: int) -> int:
    return min(k, sum(len(node.gpus) for node in request.all_nodes))


def _pack(
    queue: Sequence[Item], request: Request
) -> tuple[dict[str, tuple[Placement, ...]], tuple[str, ...]]:
    return pack(queue, request.nodes, 1, request.all_nodes)


def _reasons(request: Request, decision: Decision, k: int) -> dict[str, str]:
    """Return which members get less or more than K, and what the others wait for."""
    started = {allocation.member: allocation.gpus for allocation in decision.start}
    waiting = [workload for workload in request.workloads if workload.name not in started]
    other = {
        name: f"{gpu_count(gpus)} and not {k}: it can use no {'more' if gpus < k else 'fewer'} here"
        for name, gpus in started.items()
        if gpus != k
    }
    if not waiting:
        return other
    free = request.free_gpus - sum(started.values())
    head, *rest = waiting
    wanted = _wanted(head, _most(request, k))
    return other | {
        head.name: f"waits for {gpu_count(wanted)} on as few nodes as that takes; {free} free",
        **{workload.name: f"waits: {head.name} came first" for workload in rest},
    }


def decide(request: Request) -> Decision:
    """Give each free GPU one member, in the order drawn."""
    if any(workload.min_gpus > 1 for workload in islice(request.workloads, request.free_gpus)):
        return in_turn(request, 1)
    slots = ((node.name, gpu) for node in request.nodes for gpu in node.gpus)
    return Decision(
        tuple(
            Allocation(workload.name, 1, DATA_PARALLEL, workload.rates[1], (Placement(node, (gpu,)),))
            for (node, gpu), workload in zip(slots, request.workloads, strict=False)
        )
    )


def drawn(workload: Workload, options: Options) -> bytes:
    """Return a workload's position in an order drawn from the seed and the members' names alone.

    The order of two members never depends on the other members, so refills and later jobs continue in
    the same order: a member that was interrupted comes before those that have not begun.
    """
    return _draw(options.seed, workload.name)


@lru_cache(maxsize=1 << 16)
def _draw(seed: int, name: str) -> bytes:
    # The built-in hash of text differs from process to process, and so between the jobs of a run.
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()


INDEPENDENT = Planner("independent", "local", decide, order=drawn)
