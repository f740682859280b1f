"""FLEET's Baseline (section 6.1): a free GPU takes a random member that is left."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from heapq import nsmallest

from hetctl.core.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.planners.base import Planner, Request


def allocate(request: Request) -> tuple[Allocation, ...]:
    """Give each free GPU one member, in an order drawn from the seed and the members' names alone.

    The order of two members never depends on who else is left, so refills and later jobs go on in
    the same order: a member that was interrupted comes before those that have not begun.
    """
    slots = [(node.name, gpu) for node in request.nodes for gpu in node.gpus]
    seed = request.options.seed
    chosen = nsmallest(len(slots), request.candidates, key=lambda c: _draw(seed, c.name))
    return tuple(
        Allocation(candidate.name, 1, DATA_PARALLEL, candidate.rates[1], (Placement(node, (gpu,)),))
        for candidate, (node, gpu) in zip(chosen, slots, strict=False)
    )


@lru_cache(maxsize=1 << 16)
def _draw(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()


INDEPENDENT = Planner("independent", "local", allocate, shares=False)
