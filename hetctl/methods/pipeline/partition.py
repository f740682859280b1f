"""Exact partitions: the order of GPUs and the cuts between layers that minimise the slowest stage's time.

HetPipe (section 7) uses CPLEX for this; here it is the dynamic programme of `PartitionTable`. For groups of
very many different GPUs, `parts_that_fit` finds at least a partition that fits into memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.pipeline.gpu_cluster import Gpu, Group, PipelineCluster
from hetctl.methods.pipeline.partition_table import (
    NodeGpus,
    PartitionTable,
    Pool,
    all_heads,
    most_within,
    one_head,
    pool_of,
    take,
)
from hetctl.methods.pipeline.stage_costs import StageCosts, minibatches_held
from hetctl.model.errors import InfeasibleError

Kind = TypeVar("Kind", bound=Hashable)

MOST_EFFORT, HEAD_EFFORT = 8e8, 1e5
"""Most stages to evaluate in a partition, and the equivalent number of stages for each choice of a GPU. If
all orders of GPUs take more, only some are tried."""
MOST_COUNTS = 300_000
"""Most combinations of GPUs, by memory size, that are considered."""

Used = tuple[int, ...]
"""Number of GPUs of each memory size."""


class Cut(NamedTuple):
    """A stage of a partition: layers from `first` to `last` on a GPU."""

    first: int
    last: int
    gpu: Gpu


class Partitioner:
    """Search for partitions over any group of a cluster's GPUs; results are cached.

    They are exact, except for groups of very many different GPUs. These get the better of two partitions: the
    best one that uses up a node before the next, and the one that would be exact if each GPU had a node of
    its own, if that is not too expensive. If neither fits, any partition that fits is used.

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
            cuts = min(found, key=self._slowest_s) if any(found) else self._by_memory(group)
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

    def _by_memory(self, group: Group) -> tuple[Cut, ...]:
        """Return a partition that fits, regardless of its time."""

        def free_bytes(gpu: Gpu) -> int:
            return self._cluster.free_bytes[self._cluster.type_of(gpu)]

        parts = parts_that_fit(self._costs.least_bytes, [free_bytes(gpu) for gpu in group], self._in_flight)
        return _on_gpus(parts, group, free_bytes)

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


class LayerSpan(NamedTuple):
    """Layers from `first` to `last` on a GPU with `memory_bytes`."""

    first: int
    last: int
    memory_bytes: int


def parts_that_fit(
    stage_bytes: Callable[[int, int], NDArray[np.int64]], memory_bytes: Sequence[int], in_flight: int
) -> list[LayerSpan]:
    """Return stages that fit, in the order of the layers; an empty list if there are none.

    Dynamic programming from the last layer back: for each combination of GPUs used so far (only their sizes
    matter), the stages that reach the earliest layer, since fewer remaining layers never need more memory.
    If there are more than `MOST_COUNTS` combinations, only some GPUs of each size are considered.

    Parameters
    ----------
    stage_bytes : callable
        Bytes of a stage by first and last layer, shape (layers, layers), for a number of stages that follow
        and of minibatches in flight.
    memory_bytes : sequence of int
        Memory of each GPU.
    """
    layers = len(stage_bytes(0, in_flight))
    counts = _limited({size: min(n, layers) for size, n in Counter(memory_bytes).items()})
    sizes = sorted(counts)
    reached: dict[Used, tuple[int, int]] = {(0,) * len(sizes): (layers, -1)}
    earliest: dict[tuple[int, int], NDArray[np.int64]] = {}
    for used in product(*(range(counts[size] + 1) for size in sizes)):
        if not any(used):
            continue
        # Counted from the last stage, since a stage's memory depends on how many stages follow it.
        stages_after = sum(used) - 1
        held = minibatches_held(stages_after, in_flight)
        found = (layers, -1)
        for at in (at for at, count in enumerate(used) if count):
            key = (sizes[at], held)
            if key not in earliest:
                earliest[key] = _earliest(stage_bytes(stages_after, in_flight), sizes[at])
            found = min(found, (int(earliest[key][reached[_less(used, at)][0]]), at))
        reached[used] = found
        if found[0] == 0:
            return _parts(reached, used, sizes)
    return []


def _limited(counts: Mapping[int, int]) -> dict[int, int]:
    """Return the numbers of GPUs by size, reduced to at most `MOST_COUNTS` combinations."""
    limited = dict(counts)
    while math.prod(count + 1 for count in limited.values()) > MOST_COUNTS:
        most = max(limited, key=lambda size: limited[size])
        limited[most] -= 1
    return limited


def _earliest(needed: NDArray[np.int64], memory_bytes: int) -> NDArray[np.int64]:
    """Return the earliest first layer of a stage by the layer after its last; that layer if none fits."""
    fits = np.triu(needed <= memory_bytes)
    ends = np.arange(1, len(needed) + 1)
    return np.concatenate([[0], np.where(fits.any(axis=0), fits.argmax(axis=0), ends)])


def _less(used: Used, at: int) -> Used:
    return (*used[:at], used[at] - 1, *used[at + 1 :])


def _parts(reached: Mapping[Used, tuple[int, int]], used: Used, sizes: Sequence[int]) -> list[LayerSpan]:
    parts = []
    while any(used):
        first, at = reached[used]
        used = _less(used, at)
        parts.append(LayerSpan(first, reached[used][0] - 1, sizes[at]))
    return parts
