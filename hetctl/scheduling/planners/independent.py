"""Random members, one GPU each: FLEET's Baseline (section 6.1), where each free GPU gets a remaining member.

A member that trains on no fewer than k GPUs gets k, and no other overtakes it meanwhile.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from itertools import islice

from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Decision, Options, Planner, Request
from hetctl.scheduling.planners.fixed import in_turn


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
