"""Which GPUs of which nodes (FLEET, Algorithms 3 and 4)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice, permutations

from hetctl.core.plan import Placement
from hetctl.core.site import Node

Item = tuple[str, int]
Shares = tuple[tuple[int, int], ...]


def pack(
    counts: Sequence[tuple[str, int]], nodes: Sequence[Node], max_permutations: int
) -> tuple[dict[str, tuple[Placement, ...]], tuple[str, ...]]:
    """Place members on nodes; return the placements, and the members that found no room.

    As in the paper, members that fill whole nodes come first, then pairs that do, then the rest in
    the best of at most `max_permutations` orders. Where the paper lets a member straddle nodes, it
    finds no room here: a placed member is on as few nodes as if all of `nodes` were its own. So its
    term of Equation 4 is at its least, and orders differ only in the GPUs that they leave unused.

    Parameters
    ----------
    counts : sequence of (str, int)
        Members with their GPUs, at least 1 each.
    nodes : sequence of Node
        With their free GPUs only, not necessarily equally many.
    """
    room = _Room.of(nodes)
    first, rest = _fill_nodes(counts, room.largest)
    rest += [item for item in first if not room.place(item)]
    best, best_out = room, list(counts)
    for order in islice(_orders(rest), max_permutations):
        trial = room.copy()
        out = [item for item in order if not trial.place(item)]
        if _total(out) < _total(best_out):
            best, best_out = trial, out
        if not out:
            break
    unplaced = {name for name, _ in best_out}
    return _placements(best.shares, nodes), tuple(name for name, _ in counts if name in unplaced)


class _Room:
    """Free GPUs by node, and each placed member's shares as (node, GPUs)."""

    def __init__(self, free: list[tuple[int, int]], sums: list[int], shares: dict[str, Shares]) -> None:
        self.free = free
        self.sums = sums
        self.shares = shares

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> _Room:
        """Start with all that is free; among equally free nodes the first one sorts last."""
        free = sorted((len(node.gpus), -index) for index, node in enumerate(nodes) if node.gpus)
        return cls(free, list(accumulate(size for size, _ in reversed(free))), {})

    @property
    def largest(self) -> int:
        """GPUs of the largest node, GPUsPerNode in the paper."""
        return self.sums[0] if self.sums else 1

    def copy(self) -> _Room:
        """Return a room that can be filled without changing this one."""
        return _Room(list(self.free), self.sums, dict(self.shares))

    def place(self, item: Item) -> bool:
        """Take GPUs of as few nodes as `item` needs: the freest whole, and the tightest fit.

        This is the paper's assignGPUs, but for unequal nodes. Returns False, and takes nothing,
        where more nodes would be needed.
        """
        name, gpus = item
        whole = bisect_left(self.sums, gpus)
        split = len(self.free) - whole
        if split <= 0:
            return False
        last = gpus - sum(size for size, _ in self.free[split:])
        fit = bisect_left(self.free, (last,), hi=split)
        if fit == split:
            return False
        size = self.free[fit][0]
        at = bisect_left(self.free, (size + 1,), hi=split) - 1
        taken = [self.free[at], *self.free[split:]]
        del self.free[split:], self.free[at]
        if size > last:
            insort(self.free, (size - last, taken[0][1]))
        shares = [(-taken[0][1], last), *((-node, size) for size, node in taken[1:])]
        self.shares[name] = tuple(sorted(shares))
        return True


def _fill_nodes(counts: Sequence[Item], node_size: int) -> tuple[list[Item], list[Item]]:
    """Return the members that fill whole nodes, alone and then in pairs, and the others."""
    whole = [item for item in counts if item[1] % node_size == 0]
    pairs: list[Item] = []
    alone: dict[int, list[Item]] = defaultdict(list)
    for item in counts:
        part = item[1] % node_size
        if part and alone[node_size - part]:
            pairs += sorted((alone[node_size - part].pop(0), item), key=_gpus, reverse=True)
        elif part:
            alone[part].append(item)
    return whole + pairs, [item for items in alone.values() for item in items]


def _orders(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Yield orders of `items`, the largest first to begin with; members with as many GPUs stay together."""
    alike: dict[int, list[Item]] = defaultdict(list)
    for item in sorted(items, key=_gpus, reverse=True):
        alike[item[1]].append(item)
    for groups in permutations(alike.values()):
        yield [item for group in groups for item in group]


def _gpus(item: Item) -> int:
    return item[1]


def _total(items: Sequence[Item]) -> int:
    return sum(gpus for _, gpus in items)


def _placements(shares: Mapping[str, Shares], nodes: Sequence[Node]) -> dict[str, tuple[Placement, ...]]:
    left = [list(node.gpus) for node in nodes]
    placements = {}
    for name, parts in shares.items():
        placed = []
        for index, size in parts:
            gpus, left[index] = left[index][:size], left[index][size:]
            placed.append(Placement(nodes[index].name, tuple(gpus)))
        placements[name] = tuple(placed)
    return placements
