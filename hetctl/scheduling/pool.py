"""Nodes of a job, and their free GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from hetctl.model.plan import Placement
from hetctl.model.site import Node


class Pool:
    """GPUs of a job's nodes, in the order in which the nodes joined.

    An operation touches only the nodes of its placement, which matters on a large cluster. GPUs of a
    lost node are neither held nor free. A GPU with members in seats is held until the last of them leaves.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes: dict[str, Node] = {}
        self._free: dict[str, Node] = {}
        self._seats: dict[tuple[str, int], set[int]] = {}
        self.gpus = self.free_gpus = 0
        self.add(nodes)

    def add(self, nodes: Iterable[Node]) -> None:
        """Add nodes with all their GPUs free."""
        for node in nodes:
            self.nodes[node.name] = self._free[node.name] = node
            self.gpus += len(node.gpus)
            self.free_gpus += len(node.gpus)

    def remove(self, name: str) -> None:
        """Remove a lost node and its GPUs."""
        if lost := self.nodes.pop(name, None):
            self._seats = {gpu: seats for gpu, seats in self._seats.items() if gpu[0] != name}
            self.gpus -= len(lost.gpus)
            self.free_gpus -= len(self._free.pop(name).gpus)

    @property
    def free(self) -> tuple[Node, ...]:
        """Nodes that have free GPUs, with these GPUs only."""
        return tuple(node for node in self._free.values() if node.gpus)

    def has(self, placement: tuple[Placement, ...]) -> bool:
        """Return true if all nodes of a placement are in the job."""
        return all(part.node in self.nodes for part in placement)

    def can_hold(self, placement: tuple[Placement, ...]) -> bool:
        """Return true if all GPUs of a placement are free, or its seat is on a GPU that is shared."""
        return self.has(placement) and all(
            set(part.gpus).issubset(self._free[part.node].gpus)
            or (part.seat and part.seat not in self._seats.get((part.node, part.gpus[0]), {part.seat}))
            for part in placement
        )

    def take(self, placement: tuple[Placement, ...]) -> None:
        """Take the GPUs of a placement; those of lost nodes cannot be taken."""
        for part in placement:
            if part.node in self._free:
                self._set_free(part.node, set(self._free[part.node].gpus).difference(part.gpus))
                if part.seat:
                    self._seats.setdefault((part.node, part.gpus[0]), set()).add(part.seat)

    def release(self, placement: tuple[Placement, ...]) -> None:
        """Release the GPUs of a placement, or its seat."""
        for part in placement:
            if part.node in self._free and self._leaves(part):
                self._set_free(part.node, {*self._free[part.node].gpus, *part.gpus})

    def _leaves(self, part: Placement) -> bool:
        """Give up a seat; return true if nobody holds the GPUs any more."""
        if not part.seat:
            return True
        seats = self._seats.get((part.node, part.gpus[0]), set())
        seats.discard(part.seat)
        if not seats:
            self._seats.pop((part.node, part.gpus[0]), None)
        return not seats

    def _set_free(self, name: str, gpus: set[int]) -> None:
        node = self._free[name]
        self.free_gpus += len(gpus) - len(node.gpus)
        self._free[name] = Node(name, tuple(sorted(gpus)), node.gpu_type)
