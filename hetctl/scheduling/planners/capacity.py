"""Capacity check: numbers of GPUs per member that fit on nodes together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hetctl.model.site import Node


def most_on_one(node_sizes: Sequence[int]) -> int:
    """Return the most GPUs of one member: full nodes of the largest size, and a part of one more.

    Parameters
    ----------
    node_sizes : sequence of int
        GPUs of each node; 0 is the result without any.
    """
    largest = max(node_sizes, default=0)
    full = sum(size == largest for size in node_sizes)
    return full * largest + max((size for size in node_sizes if size < largest), default=0)


class NodeCapacity:
    """Numbers of GPUs that fit on nodes together, each on as few nodes as it needs.

    The check is first-fit decreasing on counts alone, which is exact for nodes of up to 4 GPUs and
    leaves few GPUs of larger ones unused.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = Counter(len(node.gpus) for node in nodes)
        self._node_size = max(self._nodes, default=1)
        self._wanted: Counter[int] = Counter()
        self.left = sum(size * count for size, count in self._nodes.items())

    def change(self, before: int, after: int) -> bool:
        """Replace a member's `before` GPUs by `after`; change nothing and return false if they do not fit."""
        if after - before > self.left:
            return False
        self._exchange(before, after)
        if after > before and not self._fits():
            self._exchange(after, before)
            return False
        return True

    def _exchange(self, before: int, after: int) -> None:
        self.left -= after - before
        for gpus, sign in ((before, -1), (after, 1)):
            whole, part = divmod(gpus, self._node_size)
            self._wanted[self._node_size] += sign * whole
            if part:
                self._wanted[part] += sign

    def _fits(self) -> bool:
        free = Counter(self._nodes)
        for gpus in range(self._node_size, 0, -1):
            count = self._wanted[gpus]
            for size in range(gpus, self._node_size + 1):
                if not count:
                    break
                fitting = size // gpus
                used = min(free[size], -(-count // fitting))
                if not used:
                    continue
                taken = min(count, used * fitting)
                count -= taken
                free[size] -= used
                full, rest = divmod(taken, fitting)
                free[size - fitting * gpus] += full
                if rest:
                    free[size - rest * gpus] += 1
            if count:
                return False
        return True
