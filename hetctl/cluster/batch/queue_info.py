"""Facts of queues and nodes, as the batch systems tell them; a fact that one does not tell is None."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QueueFacts:
    """Limits of a queue; None means that there is no limit, or that it is unknown."""

    open: bool
    max_nodes: int | None = None
    max_wall_s: int | None = None


@dataclass(frozen=True)
class NodeClass:
    """Class of identical nodes: their number, and the resources that Slurm allocates on each."""

    nodes: int
    cores: int
    memory_mib: int
    gpus: int
