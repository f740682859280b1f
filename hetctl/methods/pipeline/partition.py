"""Exact partitions: the order of GPUs and the cuts between layers that minimise the slowest stage's time.

HetPipe (section 7) uses CPLEX for this; here it is the dynamic programme of `PartitionTable`, from the last
layer back. Its state consists of the multiset of GPUs used so far, where like GPUs and like nodes are
interchangeable, and the GPU of the stage added last; its value is a vector over the first layer of that
stage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.pipeline.stage_costs import Gpu, Group, PipelineCluster, StageCosts
from hetctl.model.errors import InfeasibleError

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
            last, link, following = self._step(pool_of(left.values()), head, first, before)
            node = take(left, head, candidates)
            yield first, last, node, head.type
            candidates = [node] if link else [other for other in left if other != node]
            head, first, before = following, last + 1, link

    def _step(self, pool: Pool, head: Head, first: int, before: int) -> tuple[int, int, Head | None]:
        """Return the last layer of a stage, the link after it, and the GPU of the next one, if any."""
        after = self._after(pool, head)
        if not after:
            return self._costs.layers - 1, 0, None
        row = self._compute(pool, head)[first] + self._costs.receive_s[before, first]
        totals = {
            link: np.maximum(row + self._costs.receive_s[link, 1:], rest) for link, rest in after.items()
        }
        link = min(totals, key=lambda which: float(totals[which].min()))
        last = int(totals[link].argmin())
        rest = self._rest[without(pool, head)]
        heads = (h for h in heads_after(pool, head, bool(link)) if h in rest)
        return last, link, min(heads, key=lambda h: float(rest[h][link, last + 1]))


Kind = TypeVar("Kind", bound=Hashable)

MOST_EFFORT, HEAD_EFFORT = 8e8, 1e5
"""Most stages to evaluate in a partition, and the equivalent number of stages for each choice of a GPU. If
all orders of GPUs take more, only some are tried."""


class Cut(NamedTuple):
    """A stage of a partition: layers from `first` to `last` on a GPU."""

    first: int
    last: int
    gpu: Gpu


class Partitioner:
    """Search for partitions over any group of a cluster's GPUs; results are cached.

    They are exact, except for groups of very many different GPUs. These get the better of two partitions: the
    best one that uses up a node before the next, and the one that would be exact if each GPU had a node of
    its own, if that is not too expensive.

    Parameters
    ----------
    in_flight : int
        N_m: minibatches in the pipeline, which have to fit into memory.
    """

    def __init__(self, costs: StageCosts, cluster: PipelineCluster, in_flight: int) -> None:
        self._costs, self._cluster = costs, cluster
        self._in_flight = in_flight
        self._types = cluster.gpu_types
        self._exact, self._in_one_order = (
            PartitionTable(costs, self._types, in_flight, heads) for heads in (all_heads, one_head)
        )
        self._large: dict[Group, tuple[float, tuple[Cut, ...]]] = {}

    def bottleneck_s(self, group: Group) -> float:
        """Return the seconds of the slowest stage of the best partition; infinite if none fits.

        GPUs that would slow down the pipeline stay idle.
        """
        pool = pool_of(self._by_node(group).values())
        return self._exact.best(pool)[0] if self._is_small(pool) else self._of_large(group)[0]

    def partition(self, group: Group) -> tuple[Cut, ...]:
        """Return the best partition over a group, in the order of the layers.

        Raises
        ------
        InfeasibleError
            If the layers do not fit into the GPUs' memory.
        """
        is_small = self._is_small(pool_of(self._by_node(group).values()))
        cuts = self._by_nodes(self._exact, group) if is_small else self._of_large(group)[1]
        if not cuts:
            counts = sorted(Counter(map(self._cluster.type_of, group)).items())
            types = ", ".join(f"{count} {name or 'GPU'}" for name, count in counts)
            raise InfeasibleError(
                f"a virtual worker of {types} has no room for all layers with N_m = {self._in_flight}",
                hint="use GPUs with more memory, more of them, or a smaller minibatch",
            )
        return cuts

    def _is_small(self, pool: Pool) -> bool:
        choices = most_within(pool) * len(list(all_heads(pool)))
        return choices * (self._costs.layers**2 + HEAD_EFFORT) <= MOST_EFFORT

    def _of_large(self, group: Group) -> tuple[float, tuple[Cut, ...]]:
        """Return bottleneck and cuts of the fastest partition tried; infinite and no cuts if none fits."""
        if group not in self._large:
            found = [self._by_nodes(self._in_one_order, group), self._by_types(group)]
            cuts = min(found, key=self._slowest_s)
            self._large[group] = self._slowest_s(cuts), cuts
        return self._large[group]

    def _best_of(
        self, table: PartitionTable, nodes: Mapping[int, NodeGpus]
    ) -> list[tuple[int, int, int, str]]:
        """Return first and last layer, node and type of each stage; an empty list if none fits."""
        left = dict(nodes)
        if table.best(pool_of(left.values()))[0] == np.inf:
            return []
        while (idle := table.best(pool_of(left.values()))[1]) is not None:
            take(left, idle, left)
        return [(first, last, node, self._types[kind]) for first, last, node, kind in table.walk(left)]

    def _by_nodes(self, table: PartitionTable, group: Group) -> tuple[Cut, ...]:
        stages = self._best_of(table, self._by_node(group))
        wanted = [(first, last, (node, kind)) for first, last, node, kind in stages]
        return _on_gpus(wanted, group, lambda gpu: (gpu[0], self._cluster.type_of(gpu)))

    def _by_types(self, group: Group) -> tuple[Cut, ...]:
        """Return the partition that is exact if no two GPUs share a node."""
        alone = {number: self._by_node((gpu,))[gpu[0]] for number, gpu in enumerate(group)}
        if not self._is_small(pool_of(alone.values())):
            return ()
        wanted = [(first, last, kind) for first, last, _, kind in self._best_of(self._exact, alone)]
        return _on_gpus(wanted, group, self._cluster.type_of)

    def _slowest_s(self, cuts: Sequence[Cut]) -> float:
        receive = self._costs.receive_s
        links = [0, *(int(a.gpu[0] == b.gpu[0]) for a, b in pairwise(cuts)), 0]
        seconds = [np.inf] if not cuts else []
        for at, (first, last, gpu) in enumerate(cuts):
            gpu_type, stages_after = self._cluster.type_of(gpu), len(cuts) - 1 - at
            computed_s = self._costs.compute_s(gpu_type, stages_after, self._in_flight)[first, last]
            received_s = receive[links[at], first] + receive[links[at + 1], last + 1]
            seconds.append(float(computed_s + received_s))
        return max(seconds)

    def _by_node(self, group: Group) -> dict[int, NodeGpus]:
        counts: dict[int, list[int]] = {}
        for gpu in group:
            of_node = counts.setdefault(gpu[0], [0] * len(self._types))
            of_node[self._types.index(self._cluster.type_of(gpu))] += 1
        return {node: tuple(count) for node, count in counts.items()}


def _on_gpus(
    wanted: Iterable[tuple[int, int, Kind]], group: Group, kind_of: Callable[[Gpu], Kind]
) -> tuple[Cut, ...]:
    """Assign stages to GPUs of their kinds, if possible on the node of the previous stage."""
    free = sorted(group)
    cuts: list[Cut] = []
    for first, last, kind in wanted:
        node = cuts[-1].gpu[0] if cuts else -1
        gpu = min((gpu for gpu in free if kind_of(gpu) == kind), key=lambda gpu: (gpu[0] != node, gpu))
        free.remove(gpu)
        cuts.append(Cut(first, last, gpu))
    return tuple(cuts)
