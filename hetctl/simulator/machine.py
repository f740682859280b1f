"""The nodes of a simulated cluster: which GPUs are free, and which nodes are down."""

from __future__ import annotations

from hetctl.core.plan import Allocation
from hetctl.core.site import Cluster, Node


class Machine:
    """GPUs that members hold, and those that they do not."""

    def __init__(self, cluster: Cluster) -> None:
        self._nodes = cluster.nodes
        self._free = {node.name: set(node.gpus) for node in cluster.nodes}
        self._types = {node.name: node.gpu_type for node in cluster.nodes}
        self._down: set[str] = set()
        self._count()

    def _count(self) -> None:
        self.up = tuple(node for node in self._nodes if node.name not in self._down)
        self.gpus = sum(len(node.gpus) for node in self.up)

    @property
    def free(self) -> tuple[Node, ...]:
        """The nodes that are up and have free GPUs, with those alone."""
        return tuple(
            Node(name, tuple(sorted(gpus)), self._types[name])
            for name, gpus in self._free.items()
            if gpus and name not in self._down
        )

    @property
    def any_down(self) -> bool:
        """Whether a node is to come back."""
        return bool(self._down)

    def can_hold(self, allocation: Allocation) -> bool:
        """Whether all GPUs of an allocation are free and up."""
        return all(
            part.node not in self._down and self._free[part.node].issuperset(part.gpus)
            for part in allocation.placement
        )

    def take(self, allocation: Allocation) -> None:
        """Take the GPUs of an allocation; they must be free."""
        for part in allocation.placement:
            self._free[part.node].difference_update(part.gpus)

    def release(self, allocation: Allocation) -> None:
        """Give the GPUs of an allocation back."""
        for part in allocation.placement:
            self._free[part.node].update(part.gpus)

    def fail(self, node: str) -> None:
        """Let a node go down."""
        self._down.add(node)
        self._count()

    def repair(self, node: str) -> None:
        """Let a node come up again."""
        self._down.discard(node)
        self._count()
