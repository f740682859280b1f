"""Packing of members on the GPUs of nodes (FLEET, Algorithms 3 and 4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from operator import itemgetter

from hetctl.model.plan import Placement
from hetctl.model.site import Node

Item = tuple[str, int]
Shares = list[tuple[int, int]]


def pack(
    counts: Sequence[tuple[str, int]],
    nodes: Sequence[Node],
    max_permutations: int,
    cluster: Sequence[Node] = (),
) -> tuple[dict[str, tuple[Placement, ...]], tuple[str, ...]]:
    """Place members on nodes (Algorithm 3); return the placements, and the members that did not fit.

    As in the paper, members that fill whole nodes come first, then pairs that do, then the rest in the
    best of a number of orders. In contrast to the paper, no member straddles nodes: a placed member is
    on as few nodes as on an empty `cluster`, and others stay unplaced. So the terms of Equation 4 are
    minimal, and orders differ only in the GPUs that they leave unused.

    Parameters
    ----------
    counts : sequence of (str, int)
        Members with their GPUs, at least 1 each.
    nodes : sequence of Node
        Nodes with their free GPUs only, not necessarily equally many.
    max_permutations : int
        Largest number of orders and beginnings of orders to try; equivalent ones count once.
    cluster : sequence of Node
        Nodes with all their GPUs; empty means that `nodes` is all there is.
    """
    packing = _Packing(nodes, cluster or nodes)
    first, rest = _fill_nodes(counts, packing.node_size)
    rest += [item for item in first if not packing.place(item)]
    alike: dict[int, list[Item]] = defaultdict(list)
    for item in sorted(rest, key=itemgetter(1), reverse=True):
        alike[item[1]].append(item)
    groups = tuple((gpus, len(items)) for gpus, items in alike.items())
    for gpus, _ in _Orders(packing.free, groups, max_permutations).best:
        for item in alike[gpus]:
            packing.place(item)
    unplaced = tuple(name for name, _ in counts if name not in packing.shares)
    return _placements(packing.shares, nodes), unplaced


class _Free:
    """Numbers of nodes by their number of free GPUs.

    Parameters
    ----------
    numbers : counter of int
        Nodes by their free GPUs, above 0.
    sums : sequence of int
        GPUs of the largest node of the cluster, of the two largest, and so on.
    """

    def __init__(self, numbers: Counter[int], sums: Sequence[int]) -> None:
        self.numbers, self._sums = numbers, sums

    @property
    def gpus(self) -> int:
        """Number of free GPUs on all nodes."""
        return sum(size * number for size, number in self.numbers.items())

    def find(self, gpus: int) -> list[tuple[int, int]] | None:
        """Return (free GPUs, GPUs taken) of a member's nodes: the freest as a whole, and the tightest fit.

        Return None if it would need more nodes than on an empty cluster.
        """
        count, left, found = bisect_left(self._sums, gpus), gpus, list[tuple[int, int]]()
        sizes = sorted(self.numbers)
        while len(found) < count and sizes:
            size = sizes.pop()
            used = min(self.numbers[size], count - len(found))
            if self.numbers[size] > used:
                sizes.append(size)
            found += [(size, size)] * used
            left -= size * used
        fit = bisect_left(sizes, left)
        return [*found, (sizes[fit], left)] if fit < len(sizes) and len(found) == count else None

    def take(self, size: int, gpus: int, nodes: int = 1) -> None:
        """Take GPUs on each of `nodes` nodes that have `size` free."""
        self.numbers[size] -= nodes
        if not self.numbers[size]:
            del self.numbers[size]
        if size > gpus:
            self.numbers[size - gpus] += nodes

    def after(self, gpus: int, members: int) -> tuple[_Free, int]:
        """Return the free GPUs after `members` members took `gpus` each, and how many found no room."""
        free = _Free(self.numbers.copy(), self._sums)
        while members and (parts := free.find(gpus)):
            if len(parts) > 1:
                for size, taken in parts:
                    free.take(size, taken)
                members -= 1
            else:
                # Each node with the tightest fit takes as many members as it has room for.
                ((size, _),) = parts
                each = min(size // gpus, members)
                nodes = min(members // each, free.numbers[size])
                free.take(size, each * gpus, nodes)
                members -= each * nodes
        return free, members


class _Packing:
    """Free GPUs by node, and each placed member's shares as (node, GPUs)."""

    def __init__(self, nodes: Sequence[Node], cluster: Sequence[Node]) -> None:
        sizes = sorted((len(node.gpus) for node in cluster), reverse=True)
        self.node_size = max(sizes, default=0) or 1
        self.shares: dict[str, Shares] = {}
        self._nodes: defaultdict[int, list[int]] = defaultdict(list)
        for index, node in enumerate(nodes):
            # Indices come in ascending order, so that each list already is a heap.
            self._nodes[len(node.gpus)].append(index)
        numbers = Counter(len(node.gpus) for node in nodes if node.gpus)
        self.free = _Free(numbers, list(accumulate(sizes)))

    def place(self, item: Item) -> bool:
        """Take GPUs for a member on the first of equally free nodes (Algorithm 4)."""
        name, gpus = item
        parts = self.free.find(gpus)
        if parts is None:
            return False
        shares = []
        for size, taken in parts:
            node = heappop(self._nodes[size])
            shares.append((node, taken))
            self.free.take(size, taken)
            if size > taken:
                heappush(self._nodes[size - taken], node)
        self.shares[name] = sorted(shares)
        return True


Groups = tuple[tuple[int, int], ...]
"""Pairs of a number of GPUs and the number of members that get that many."""


class _Orders:
    """Search for the order with the fewest unplaced GPUs (Algorithm 3, lines 25 to 41).

    Members with equally many GPUs stay together.

    Parameters
    ----------
    groups : tuple of (int, int)
        First order to try.
    """

    def __init__(self, free: _Free, groups: Groups, limit: int) -> None:
        self.best = groups
        self._best_out = _out_of(free, groups)
        self._left = limit - 1
        self._reached: dict[tuple[Groups, frozenset[tuple[int, int]]], int] = {}
        self._try((), groups, free, 0)

    def _try(self, begun: Groups, rest: Groups, free: _Free, out: int) -> None:
        """Try orders that begin with `begun`, after which `free` is left and `out` GPUs were not placed."""
        # Bound: at least so many GPUs stay unplaced, in any order of the rest.
        wanted = sum(gpus * members for gpus, members in rest)
        if out + max(wanted - free.gpus, 0) >= self._best_out:
            return
        key = rest, frozenset(free.numbers.items())
        # The same members are left on the same free GPUs: another order of the earlier ones gains nothing.
        if self._reached.get(key, out + 1) <= out:
            return
        self._reached[key] = out
        if not rest:
            self.best, self._best_out = begun, out
        for at, (gpus, members) in enumerate(rest):
            if not self._left:
                return
            self._left -= 1
            after, unplaced = free.after(gpus, members)
            self._try((*begun, rest[at]), (*rest[:at], *rest[at + 1 :]), after, out + gpus * unplaced)


def _out_of(free: _Free, groups: Groups) -> int:
    out = 0
    for gpus, members in groups:
        free, unplaced = free.after(gpus, members)
        out += gpus * unplaced
    return out


def _fill_nodes(counts: Iterable[Item], node_size: int) -> tuple[list[Item], list[Item]]:
    """Return the members that fill whole nodes, alone and in pairs, and the others (lines 5 to 24)."""
    whole: list[Item] = []
    pairs: list[Item] = []
    alone: defaultdict[int, deque[Item]] = defaultdict(deque)
    for item in counts:
        part = item[1] % node_size
        if not part:
            whole.append(item)
        elif alone[node_size - part]:
            pairs += sorted((alone[node_size - part].popleft(), item), key=itemgetter(1), reverse=True)
        else:
            alone[part].append(item)
    return whole + pairs, [item for items in alone.values() for item in items]


def _placements(shares: Mapping[str, Shares], nodes: Sequence[Node]) -> dict[str, tuple[Placement, ...]]:
    used = [0] * len(nodes)
    placements = {}
    for name, parts in shares.items():
        placed = []
        for index, size in parts:
            begin = used[index]
            used[index] += size
            placed.append(Placement(nodes[index].name, nodes[index].gpus[begin : used[index]]))
        placements[name] = tuple(placed)
    return placements
