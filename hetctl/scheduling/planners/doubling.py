"""The doubling heuristic of Capes et al. (section 4.2, Equation 6): powers of two, by gain per GPU.

Every member gets 1 worker, first come, first served where members are more than GPUs. Then the one
whose time t_j = Q_j / f(w_j) falls most per added GPU is doubled, as long as there are GPUs for it. The
paper does this periodically and from scratch; here it is done whenever a member comes or goes, and what
a resize costs is weighed: the time of a restart is part of t_j, and members in training are made smaller
only so that all have a worker. What the greedy choice leaves to gain is then looked for by `exchange`.
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
    """Return GPUs by member, powers of two but for what fixed ones hold."""
    counts = allot(jobs, nodes, twice)
    left = sum(len(node.gpus) for node in nodes) - sum(counts.values())
    better = exchange(jobs, counts, left)
    return better if better == counts or _fit(better, nodes) else counts


def _fit(counts: Mapping[str, int], nodes: Sequence[Node]) -> bool:
    room = NodeCapacity(nodes)
    return all(room.change(0, gpus) for gpus in counts.values())


DOUBLING = by_gain("doubling", twice, double)
