"""Placement of members, given their numbers of GPUs: whether they fit, what stays, what moves."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from dataclasses import field

from hetctl.model.plan import Placement
from hetctl.model.site import Node
from hetctl.model.values import dataclass
from hetctl.scheduling.planners.base import Decision, Request, allocation_on


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


MOST_NODES_COMPARED = 64
"""Number of nodes compared if members have to move for another one."""


@dataclass
class _FreeNode:
    """A node with its free GPUs, and members that may be moved."""

    name: str
    free: list[int]
    movable: dict[str, tuple[int, ...]] = field(default_factory=dict)


def place_members(request: Request, counts: Mapping[str, int]) -> tuple[Decision, dict[str, int]]:
    """Return the decision that gives members their `counts`, and the GPUs that each of them really gets.

    A member that already holds its number of GPUs keeps them, unless it has to make room for a larger
    one; all others are placed on as few nodes as they need, the largest first, by the tightest fit. A
    member that does not fit gets fewer GPUs, or none and waits.

    Parameters
    ----------
    counts : mapping of str to int
        GPUs by member; members that are missing get none.
    """
    nodes = _FreeNodes(request, counts)
    nodes.place_all()
    held = {h.workload.name: h.allocation.placement for h in request.held}
    start = (
        allocation_on(nodes.workloads[name], placement)
        for name, placement in nodes.placed.items()
        if held.get(name) != placement
    )
    return Decision(tuple(start), tuple(name for name in held if name not in nodes.counts)), nodes.counts


class _FreeNodes:
    def __init__(self, request: Request, counts: Mapping[str, int]) -> None:
        held = {h.workload.name: h for h in request.held}
        fixed = {name: h.allocation.gpus for name, h in held.items() if h.fixed}
        self.workloads = ChainMap({name: h.workload for name, h in held.items()}, request.waiting.by_name)
        self.counts = fixed | {name: gpus for name, gpus in counts.items() if gpus and name not in fixed}
        self.placed: dict[str, tuple[Placement, ...]] = {}
        self._places = {node.name: _FreeNode(node.name, list(node.gpus)) for node in request.nodes}
        self._node_size = max((len(node.gpus) for node in request.all_nodes), default=1)
        self._kept = {name for name, h in held.items() if self.counts.get(name) == h.allocation.gpus}
        self._before = {name: h.allocation for name, h in held.items()}
        for name, h in held.items():
            for part in h.allocation.placement:
                place = self._places.setdefault(part.node, _FreeNode(part.node, []))
                if name not in self._kept:
                    place.free.extend(part.gpus)
                elif not h.fixed and len(h.allocation.placement) == 1:
                    place.movable[name] = part.gpus
        # Dictionaries serve as sets that keep their order, so that placements are the same in every process.
        self._by_free: list[dict[str, None]] = [{} for _ in range(self._node_size + 1)]
        for place in self._places.values():
            self._by_free[len(place.free)][place.name] = None

    def place_all(self) -> None:
        """Place all members that do not keep their GPUs."""
        self._queue = sorted(
            (name for name in self.counts if name not in self._kept),
            key=lambda name: -self.counts[name],
        )
        self._queue.reverse()
        while self._queue:
            name = self._queue.pop()
            for gpus in range(self.counts[name], self.workloads[name].min_gpus - 1, -1):
                if self._stays(name, gpus):
                    break
                parts = self._find(gpus) or self._make_room(gpus)
                if parts:
                    self._put(name, parts)
                    break
            else:
                del self.counts[name]

    def _stays(self, name: str, gpus: int) -> bool:
        """Give a member for which there are no more GPUs than it has its own ones, if they are still free."""
        before = self._before.get(name)
        if before is None or before.gpus != gpus:
            return False
        if not all(set(part.gpus) <= set(self._places[part.node].free) for part in before.placement):
            return False
        for part in before.placement:
            place = self._places[part.node]
            self._refile(place, [gpu for gpu in place.free if gpu not in part.gpus])
        self.counts[name], self.placed[name] = gpus, before.placement
        return True

    def _find(self, gpus: int) -> list[tuple[str, int]] | None:
        """Return (node, GPUs) for a member, on as few nodes as it needs; None if there is no room."""
        whole, part = divmod(gpus, self._node_size)
        empty = self._by_free[self._node_size]
        if len(empty) < whole:
            return None
        parts = [(name, self._node_size) for name, _ in zip(empty, range(whole), strict=False)]
        if part:
            taken = {name for name, _ in parts}
            for size in range(part, self._node_size + 1):
                fitting = next((name for name in self._by_free[size] if name not in taken), None)
                if fitting is not None:
                    return [*parts, (fitting, part)]
            return None
        return parts

    def _make_room(self, gpus: int) -> list[tuple[str, int]] | None:
        """Move smaller members off the node where the fewest GPUs move; return None if there is none."""
        if gpus > self._node_size or gpus > sum(len(b) * free for free, b in enumerate(self._by_free)):
            return None
        best: tuple[int, str, list[str]] | None = None
        for name in self._most_free():
            found = self._movers(self._places[name], gpus)
            if found is not None and (best is None or found[0] < best[0]):
                best = (found[0], name, found[1])
        if best is None:
            return None
        _, node, movers = best
        for name in movers:
            self._lift(name, node)
        return [(node, gpus)]

    def _most_free(self) -> list[str]:
        names: list[str] = []
        for bucket in reversed(self._by_free[1:]):
            names.extend(list(bucket)[: MOST_NODES_COMPARED - len(names)])
        return names

    def _movers(self, place: _FreeNode, gpus: int) -> tuple[int, list[str]] | None:
        """Return how many GPUs have to move from a node to free `gpus`, and their members; all hold fewer."""
        missing = gpus - len(place.free)
        sizes = sorted(
            ((len(held), name) for name, held in place.movable.items() if len(held) < gpus), reverse=True
        )
        chosen: list[tuple[int, str]] = []
        for size, name in sizes:
            if size <= missing:
                chosen.append((size, name))
                missing -= size
        if missing > 0:
            larger = [item for item in reversed(sizes) if item not in chosen and item[0] >= missing]
            if not larger:
                return None
            chosen.append(larger[0])
        return sum(size for size, _ in chosen), [name for _, name in chosen]

    def _lift(self, name: str, node: str) -> None:
        place = self._places[node]
        self._refile(place, [*place.free, *place.movable.pop(name)])
        self._kept.discard(name)
        at = next(
            (i for i, other in enumerate(self._queue) if self.counts[other] >= self.counts[name]),
            len(self._queue),
        )
        self._queue.insert(at, name)

    def _put(self, name: str, parts: Sequence[tuple[str, int]]) -> None:
        placed = []
        for node, gpus in parts:
            place = self._places[node]
            free = sorted(place.free)
            placed.append(Placement(node, tuple(free[:gpus])))
            self._refile(place, free[gpus:])
        self.counts[name] = sum(gpus for _, gpus in parts)
        self.placed[name] = tuple(placed)

    def _refile(self, place: _FreeNode, free: list[int]) -> None:
        del self._by_free[len(place.free)][place.name]
        place.free = free
        self._by_free[len(free)][place.name] = None
