"""Dynamic programme for the partitions of a network over a group of GPUs, from the last layer back.

Its state consists of the multiset of GPUs used so far, where like GPUs and like nodes are interchangeable,
and the GPU of the stage added last; its value is a vector over the first layer of that stage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.pipeline.stage_costs import StageCosts

NodeGpus = tuple[int, ...]
"""Number of GPUs of each type of the cluster on a node."""
Pool = tuple[NodeGpus, ...]
"""GPUs by node, sorted, without empty nodes: like GPUs and like nodes are interchangeable."""


class Head(NamedTuple):
    """A GPU of a pool, described by the GPUs on its node and by its type."""

    node: NodeGpus
    type: int


def pool_of(nodes: Iterable[NodeGpus]) -> Pool:
    """Return the pool of some nodes."""
    return tuple(sorted(node for node in nodes if any(node)))


def left_of(head: Head) -> NodeGpus:
    """Return the head's node without its GPU."""
    return tuple(count - (gpu_type == head.type) for gpu_type, count in enumerate(head.node))


def without(pool: Pool, head: Head) -> Pool:
    """Return the pool without the head's GPU."""
    nodes = list(pool)
    nodes.remove(head.node)
    return pool_of([*nodes, left_of(head)])


def all_heads(pool: Pool) -> Iterator[Head]:
    """Yield all distinct GPUs."""
    for node in dict.fromkeys(pool):
        yield from (Head(node, gpu_type) for gpu_type, count in enumerate(node) if count)


def one_head(pool: Pool) -> Iterator[Head]:
    """Yield one GPU; repeated calls use up one node before the next."""
    yield from list(all_heads(pool[:1]))[:1]


def heads_after(pool: Pool, head: Head, same_node: bool) -> Iterator[Head]:
    """Yield the distinct GPUs that are left on the head's node, or on all others."""
    others = list(pool)
    others.remove(head.node)
    yield from all_heads((left_of(head),) if same_node else tuple(others))


def most_within(pool: Pool) -> int:
    """Return an upper bound of the number of subpools, the pool itself and the empty one included."""
    kinds = Counter(pool).items()
    states_and_nodes = [(math.prod(count + 1 for count in node), nodes) for node, nodes in kinds]
    return math.prod(math.comb(states + nodes - 1, nodes) for states, nodes in states_and_nodes)


def take(left: dict[int, NodeGpus], head: Head, candidates: Iterable[int]) -> int:
    """Remove a GPU from the first candidate node that is as full as the head's; return that node."""
    node = next(node for node in candidates if left[node] == head.node)
    left[node] = left_of(head)
    return node


@dataclass(frozen=True)
class _Choice:
    """Choice after a stage: its last layer, and the GPU of the next stage."""

    last: int
    same_node: bool
    head: Head | None


class PartitionTable:
    """Dynamic programme of the partitions.

    Parameters
    ----------
    heads : callable
        Function from a pool to the GPUs that may have the first of the remaining stages.
    """

    def __init__(
        self,
        costs: StageCosts,
        types: tuple[str, ...],
        in_flight: int,
        heads: Callable[[Pool], Iterable[Head]],
    ) -> None:
        self._costs, self._types, self._in_flight, self._heads = costs, types, in_flight, heads
        self._rest: dict[Pool, dict[Head, NDArray[np.float64]]] = {(): {}}
        self._best: dict[Pool, tuple[float, Head | None]] = {(): (np.inf, None)}
        self._of_level: dict[tuple[int, int], NDArray[np.float64]] = {}

    def best(self, pool: Pool) -> tuple[float, Head | None]:
        """Return the least bottleneck, and a GPU to leave idle for it; None if all are used."""
        if pool not in self._best:
            levels = [{pool}]
            while lower := {without(p, head) for p in levels[-1] for head in self._heads(p)}:
                levels.append(lower - self._best.keys())
            for level in reversed(levels):
                # Stage times depend on the number of GPUs used, which is the same within a level only.
                self._of_level.clear()
                self._best.update((p, self._better_of_all(p)) for p in level)
        return self._best[pool]

    def _better_of_all(self, pool: Pool) -> tuple[float, Head | None]:
        heads = list(self._heads(pool))
        self._rest[pool] = {head: self._values(pool, head) for head in heads}
        full = min(float(values[0, 0]) for values in self._rest[pool].values())
        found: tuple[float, Head | None] = (full, None)
        for head in heads:
            value = self._best[without(pool, head)][0]
            if value < found[0]:
                found = (value, head)
        return found

    def _values(self, pool: Pool, head: Head) -> NDArray[np.float64]:
        """Return the least bottleneck of the remaining layers, shape (2, layers).

        Column j is for a stage at `head` that begins with layer j, with all GPUs of the pool used. Row 1
        is for a previous stage on the same node, row 0 for one on another node.
        """
        after = self._after(pool, head)
        if not after:
            return self._compute(pool, head)[:, -1] + self._costs.receive_s[:, :-1]
        values = [
            np.maximum(self._stage_s(pool, head, link), rest).min(axis=2) for link, rest in after.items()
        ]
        least: NDArray[np.float64] = np.min(values, axis=0)
        return least

    def _stage_s(self, pool: Pool, head: Head, link: int) -> NDArray[np.float64]:
        """Return the seconds of the stage at `head` by link before it, first and last layer.

        They are equal for all pools of the same size.
        """
        key = (head.type, link)
        if key not in self._of_level:
            receive = self._costs.receive_s
            self._of_level[key] = self._compute(pool, head) + receive[:, :-1, None] + receive[link, 1:]
        return self._of_level[key]

    def _compute(self, pool: Pool, head: Head) -> NDArray[np.float64]:
        stages_after = sum(map(sum, pool)) - 1
        return self._costs.compute_s(self._types[head.type], stages_after, self._in_flight)

    def _after(self, pool: Pool, head: Head) -> dict[int, NDArray[np.float64]]:
        """Return by link the least bottleneck of the stages after one that ends with each layer."""
        after: dict[int, NDArray[np.float64]] = {}
        rest = self._rest[without(pool, head)]
        for link in (0, 1):
            values = [rest[h][link, 1:] for h in heads_after(pool, head, bool(link)) if h in rest]
            if values:
                after[link] = np.append(np.min(values, axis=0), np.inf)
        return after

    def walk(self, left: dict[int, NodeGpus]) -> Iterator[tuple[int, int, int, int]]:
        """Follow the best choices over the remaining GPUs of each node, all of which are used.

        Yields the first and last layer, the node and the type of every stage.
        """
        values = self._rest[pool_of(left.values())]
        head: Head | None = min(values, key=lambda h: float(values[h][0, 0]))
        candidates, first, before = list(left), 0, 0
        while head is not None:
            step = self._step(pool_of(left.values()), head, first, before)
            node = take(left, head, candidates)
            yield first, step.last, node, head.type
            candidates = [node] if step.same_node else [other for other in left if other != node]
            head, first, before = step.head, step.last + 1, int(step.same_node)

    def _step(self, pool: Pool, head: Head, first: int, before: int) -> _Choice:
        after = self._after(pool, head)
        if not after:
            return _Choice(self._costs.layers - 1, False, None)
        row = self._compute(pool, head)[first] + self._costs.receive_s[before, first]
        totals = {
            link: np.maximum(row + self._costs.receive_s[link, 1:], rest) for link, rest in after.items()
        }
        link = min(totals, key=lambda which: float(totals[which].min()))
        last = int(totals[link].argmin())
        rest = self._rest[without(pool, head)]
        heads = (h for h in heads_after(pool, head, bool(link)) if h in rest)
        return _Choice(last, bool(link), min(heads, key=lambda h: float(rest[h][link, last + 1])))
