"""The nodes of a simulated cluster: which GPUs are free, and which nodes are down."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from hetctl.core.plan import Allocation
from hetctl.core.site import Cluster, Node


class Machine:
    """GPUs that members hold, and those that they do not.

    Of a large cluster, only the nodes that an allocation touches are looked at.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._nodes = cluster.nodes
        self._numbers = {node.name: number for number, node in enumerate(cluster.nodes)}
        self._free = [set(node.gpus) for node in cluster.nodes]
        self._down: set[int] = set()
        self._listed: list[int] = []
        self._listing: list[Node] = []
        self._refresh(range(len(cluster.nodes)))
        self._count()

    def _count(self) -> None:
        self.up = tuple(node for number, node in enumerate(self._nodes) if number not in self._down)
        self.gpus = sum(len(node.gpus) for node in self.up)

    @property
    def free(self) -> tuple[Node, ...]:
        """The nodes that are up and have free GPUs, with those alone, in the cluster's order."""
        return tuple(self._listing)

    @property
    def any_free(self) -> bool:
        """Whether a GPU is free on a node that is up."""
        return bool(self._listing)

    @property
    def any_down(self) -> bool:
        """Whether a node is to come back."""
        return bool(self._down)

    def can_hold(self, allocation: Allocation) -> bool:
        """Whether all GPUs of an allocation are free and up."""
        for part in allocation.placement:
            number = self._numbers[part.node]
            if number in self._down or not self._free[number].issuperset(part.gpus):
                return False
        return True

    def type_of(self, allocation: Allocation) -> str | None:
        """Return the type of an allocation's first GPU."""
        return self._nodes[self._numbers[allocation.placement[0].node]].gpu_type

    def take(self, allocation: Allocation) -> None:
        """Take the GPUs of an allocation; they must be free."""
        for part in allocation.placement:
            self._free[self._numbers[part.node]].difference_update(part.gpus)
        self._refresh([self._numbers[part.node] for part in allocation.placement])

    def release(self, allocation: Allocation) -> None:
        """Give the GPUs of an allocation back."""
        for part in allocation.placement:
            self._free[self._numbers[part.node]].update(part.gpus)
        self._refresh([self._numbers[part.node] for part in allocation.placement])

    def fail(self, node: str) -> None:
        """Let a node go down."""
        self._down.add(self._numbers[node])
        self._refresh([self._numbers[node]])
        self._count()

    def repair(self, node: str) -> None:
        """Let a node come up again."""
        self._down.discard(self._numbers[node])
        self._refresh([self._numbers[node]])
        self._count()

    def _refresh(self, numbers: Iterable[int]) -> None:
        """List nodes anew that have changed."""
        for number in numbers:
            at = bisect_left(self._listed, number)
            if at < len(self._listed) and self._listed[at] == number:
                del self._listed[at], self._listing[at]
            free = self._free[number]
            if free and number not in self._down:
                node = self._nodes[number]
                self._listed.insert(at, number)
                self._listing.insert(at, Node(node.name, tuple(sorted(free)), node.gpu_type))
