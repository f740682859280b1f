"""Leaders of a round on several nodes: the node of each, and its number of preprocessors."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hetctl.model.plan import Allocation
from hetctl.model.profile import PreprocessPoint
from hetctl.perf.preprocessing import preprocessors_needed

NODE_VARIABLE = "SLURMD_NODENAME"
"""Variable with the node's name: Slurm numbers ranks in its own order of nodes, others in the placement's."""


def nodes_of(allocations: Sequence[Allocation]) -> tuple[str, ...]:
    """Return the nodes of a round in the order of their leaders' ranks."""
    return tuple(dict.fromkeys(place.node for a in allocations for place in a.placement))


def folder_of(run: str, node: str) -> str:
    """Return the name of the folder that the trainers on a node share."""
    return f"{run}-{node}"


def node_here(nodes: Sequence[str], rank: int) -> str:
    """Return the node of a leader."""
    told = os.environ.get(NODE_VARIABLE, "")
    return told if told in nodes else nodes[rank]


def preprocessors_of_a_node(
    allocations: Sequence[Allocation], points: Sequence[PreprocessPoint], cores: int
) -> int:
    """Return the preprocessors per node with which all nodes together supply the slowest member.

    Parameters
    ----------
    points, cores
        Parameters of `roles_of`.
    """
    demand = min(allocation.rate for allocation in allocations) / len(nodes_of(allocations))
    return preprocessors_needed(points, demand, cores)
