"""Grouping of GPUs into virtual workers: the paper's three policies for any cluster (section 8.1)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from hetctl.methods.pipeline.gpu_cluster import Gpu, Group, PipelineCluster
from hetctl.methods.pipeline.layers import LayerProfile

Grouping = tuple[Group, ...]


def node_partition(_profile: LayerProfile, cluster: PipelineCluster) -> Grouping:
    """Return NP: each node is a virtual worker; least communication, but different virtual workers."""
    return tuple(cluster.on(node) for node in range(len(cluster.nodes)))


def equal_distribution(_profile: LayerProfile, cluster: PipelineCluster) -> Grouping:
    """Return ED: as many equal virtual workers as possible, each with GPUs of every node.

    Their number is the greatest common divisor of the GPUs of each type in each node.
    """
    kinds = cluster.kinds(cluster.gpus)
    return distribute(kinds, math.gcd(*map(len, kinds)))


def hybrid_distribution(profile: LayerProfile, cluster: PipelineCluster) -> Grouping:
    """Return HD: each virtual worker has GPUs of a pair of types, such that all pairs are similar.

    The type with the highest total computing capability is paired with that of the lowest, in the paper V
    with Q and R with G; the middle one of an odd number stays alone. A pair makes as many virtual workers
    as its GPUs allow, each of the size of an average node.
    """
    size = max(1, round(len(cluster.gpus) / len(cluster.nodes)))
    groups: list[Group] = []
    for pair in _pairs(profile, cluster):
        kinds = [[gpu for gpu in cluster.gpus if cluster.type_of(gpu) == name] for name in sorted(pair)]
        groups += distribute(kinds, max(1, sum(map(len, kinds)) // size))
    return tuple(groups)


def _pairs(profile: LayerProfile, cluster: PipelineCluster) -> list[set[str]]:
    """Return pairs of types, ordered by the computing capability of all GPUs of a type together."""
    count = Counter(map(cluster.type_of, cluster.gpus))

    def capability(gpu_type: str) -> float:
        passes = profile.forward_s(gpu_type) + profile.backward_s(gpu_type)
        return count[gpu_type] / float(passes.sum())

    types = sorted(count, key=lambda gpu_type: (capability(gpu_type), gpu_type))
    return [{types[i], types[-1 - i]} for i in range((len(types) + 1) // 2)]


def distribute(kinds: Iterable[Sequence[Gpu]], count: int) -> Grouping:
    """Distribute the GPUs of each kind evenly over `count` groups: consecutive GPUs go to the same group.

    The GPUs of a kind with fewer GPUs than there are groups go to the groups with the fewest GPUs.
    """
    found: list[list[Gpu]] = [[] for _ in range(count)]
    for kind in kinds:
        for number, gpu in enumerate(kind):
            smallest = min(found, key=len)
            group = found[number * count // len(kind)] if len(kind) >= count else smallest
            group.append(gpu)
    return tuple(tuple(sorted(group)) for group in found)


GROUPINGS: dict[str, Callable[[LayerProfile, PipelineCluster], Grouping]] = {
    "np": node_partition,
    "ed": equal_distribution,
    "hd": hybrid_distribution,
}
