"""Exact partitions: the order of GPUs and the cuts between layers that make the slowest stage fastest.

HetPipe (section 7) gives this to CPLEX; here it is a dynamic programme from the last layer back. Its
state is the set of GPUs used so far, up to the exchange of like GPUs and like nodes, and the GPU that
the last stage added is on; its value is a vector over the first layer of that stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetctl.core.errors import InfeasibleError
from hetctl.planners.pipeline.cluster import Gpu, Group, PipelineCluster
from hetctl.planners.pipeline.costs import StageCosts
from hetctl.planners.pipeline.memory import minibatches_held
from hetctl.planners.pipeline.pools import (
    Head,
    Node,
    Pool,
    all_heads,
    heads_after,
    left_of,
    most_within,
    one_head,
    pool_of,
    without,
)

MOST_EFFORT, HEAD_EFFORT = 8e8, 1e5
"""Stages to look at in a partition, and as how many each choice of a GPU counts besides; if all orders
of GPUs take more, they are taken node by node."""


class Cut(NamedTuple):
    """A stage of a partition: layers from `first` to `last` on a GPU."""

    first: int
    last: int
    gpu: Gpu


class Partitioner:
    """Finds partitions over any group of a cluster's GPUs; what is found once is kept.

    Parameters
    ----------
    in_flight : int
        N_m: minibatches in the pipeline, which memory has to hold.
    """

    def __init__(self, costs: StageCosts, cluster: PipelineCluster, in_flight: int) -> None:
        self._cluster = cluster
        self._in_flight = in_flight
        self.layers = costs.layers
        self._types = cluster.gpu_types
        self._exact, self._in_one_order = (
            _Table(costs, self._types, in_flight, heads) for heads in (all_heads, one_head)
        )

    def bottleneck_s(self, group: Group) -> float:
        """Return the seconds of the slowest stage of the best partition; infinite if none fits.

        GPUs that would slow the pipeline down stay idle.
        """
        pool = pool_of(self._by_node(group).values())
        return self._table(pool).best(pool)[0]

    def partition(self, group: Group) -> tuple[Cut, ...]:
        """Return the best partition over a group, in the order of the layers.

        Raises
        ------
        InfeasibleError
            If the layers do not fit the GPUs' memory.
        """
        left = self._by_node(group)
        table = self._table(pool_of(left.values()))
        if table.best(pool_of(left.values()))[0] == np.inf:
            types = ", ".join(map(self._cluster.type_of, group))
            raise InfeasibleError(
                f"a virtual worker of {len(group)} GPUs ({types}) has no room for all layers with "
                f"N_m = {self._in_flight}",
                hint="use GPUs with more memory, more of them, or a smaller minibatch",
            )
        while (idle := table.best(pool_of(left.values()))[1]) is not None:
            _take(left, idle, left)
        free = sorted(group)
        cuts = []
        for first, last, node, gpu_type in table.walk(left):
            gpu = next(g for g in free if g[0] == node and self._cluster.type_of(g) == self._types[gpu_type])
            free.remove(gpu)
            cuts.append(Cut(first, last, gpu))
        return tuple(cuts)

    def _table(self, pool: Pool) -> _Table:
        choices = most_within(pool) * len(list(all_heads(pool)))
        is_small = choices * (self.layers**2 + HEAD_EFFORT) <= MOST_EFFORT
        return self._exact if is_small else self._in_one_order

    def _by_node(self, group: Group) -> dict[int, Node]:
        counts: dict[int, list[int]] = {}
        for gpu in group:
            of_node = counts.setdefault(gpu[0], [0] * len(self._types))
            of_node[self._types.index(self._cluster.type_of(gpu))] += 1
        return {node: tuple(count) for node, count in counts.items()}


@dataclass(frozen=True)
class _Step:
    """The choice after a stage: where it ends, and what comes then."""

    last: int
    same_node: bool
    head: Head | None


class _Table:
    """The dynamic programme.

    Parameters
    ----------
    heads : callable
        The GPUs of a pool that may have the first stage of what is left.
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
        """Return the least bottleneck, and a GPU to leave idle on the way to it."""
        if pool not in self._best:
            levels = [{pool}]
            while lower := {without(p, head) for p in levels[-1] for head in self._heads(p)}:
                levels.append(lower - self._best.keys())
            for level in reversed(levels):
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
        """Return the least bottleneck of what is left of the network, shape (2, layers).

        Where the stage at `head` begins with layer j and all GPUs of the pool are used; row 1 is for
        a stage before it on the same node.
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
        """Return the seconds of the stage at `head` by link before, first and last layer.

        They are the same for all pools of a size.
        """
        key = (head.type, link)
        if key not in self._of_level:
            receive = self._costs.receive_s
            self._of_level[key] = self._compute(pool, head) + receive[:, :-1, None] + receive[link, 1:]
        return self._of_level[key]

    def _compute(self, pool: Pool, head: Head) -> NDArray[np.float64]:
        stages_after = sum(map(sum, pool)) - 1
        held = minibatches_held(stages_after, self._in_flight)
        return self._costs.compute_s(self._types[head.type], held)

    def _after(self, pool: Pool, head: Head) -> dict[int, NDArray[np.float64]]:
        """Return by link the least bottleneck of the stages after one that ends with each layer."""
        after: dict[int, NDArray[np.float64]] = {}
        rest = self._rest[without(pool, head)]
        for link in (0, 1):
            values = [rest[h][link, 1:] for h in heads_after(pool, head, bool(link)) if h in rest]
            if values:
                after[link] = np.append(np.min(values, axis=0), np.inf)
        return after

    def walk(self, left: dict[int, Node]) -> Iterator[tuple[int, int, int, int]]:
        """Follow the best choices over what is left of each node, all of it used.

        Yields the first and last layer, the node and the type of every stage.
        """
        values = self._rest[pool_of(left.values())]
        head: Head | None = min(values, key=lambda h: float(values[h][0, 0]))
        candidates, first, before = list(left), 0, 0
        while head is not None:
            step = self._step(pool_of(left.values()), head, first, before)
            node = _take(left, head, candidates)
            yield first, step.last, node, head.type
            candidates = [node] if step.same_node else [other for other in left if other != node]
            head, first, before = step.head, step.last + 1, int(step.same_node)

    def _step(self, pool: Pool, head: Head, first: int, before: int) -> _Step:
        after = self._after(pool, head)
        if not after:
            return _Step(self._costs.layers - 1, False, None)
        row = self._compute(pool, head)[first] + self._costs.receive_s[before, first]
        totals = {
            link: np.maximum(row + self._costs.receive_s[link, 1:], rest) for link, rest in after.items()
        }
        link = min(totals, key=lambda which: float(totals[which].min()))
        last = int(totals[link].argmin())
        rest = self._rest[without(pool, head)]
        heads = (h for h in heads_after(pool, head, bool(link)) if h in rest)
        return _Step(last, bool(link), min(heads, key=lambda h: float(rest[h][link, last + 1])))


def _take(left: dict[int, Node], head: Head, candidates: Iterable[int]) -> int:
    """Take a GPU from the first of the nodes that is as full as the head's; return that node."""
    node = next(node for node in candidates if left[node] == head.node)
    left[node] = left_of(head)
    return node
