"""The doubling heuristic of Capes et al. (section 4.2, Equation 6): powers of two, by gain per GPU.

Every member gets 1 worker, first come, first served if there are more members than GPUs. Then the
member whose time t_j = Q_j / f(w_j) falls most per added GPU is doubled, as long as GPUs are left. The
paper does this periodically and from scratch. Here it is done whenever a member comes or goes, and the
cost of a resize counts: a restart is part of t_j, and members in training get fewer GPUs only so that
all have a worker. `exchange` then improves the greedy solution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetctl.model.site import Node
from hetctl.scheduling.planners.capacity import NodeCapacity
from hetctl.scheduling.planners.elastic import ResizeCandidate, allot, by_gain
from hetctl.scheduling.planners.knapsack_exchange import exchange


def twice(gpus: int) -> int:
    """Return the next power of two."""
    return 2 * gpus


def double(jobs: Sequence[ResizeCandidate], nodes: Sequence[Node]) -> dict[str, int]:
    """Return GPUs by member: powers of two, except those of fixed members."""
    counts = allot(jobs, nodes, twice)
    left = sum(len(node.gpus) for node in nodes) - sum(counts.values())
    better = exchange(jobs, counts, left)
    return better if better == counts or _fit(better, nodes) else counts


def _fit(counts: Mapping[str, int], nodes: Sequence[Node]) -> bool:
    room = NodeCapacity(nodes)
    return all(room.change(0, gpus) for gpus in counts.values())


DOUBLING = by_gain("doubling", twice, double)
