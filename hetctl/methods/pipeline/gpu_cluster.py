"""Cluster of GPUs for which pipelines are planned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetctl.methods.pipeline.communication import Links

Gpu = tuple[int, int]
"""Numbers of the node and of the GPU in it, both counted from 0."""
Group = tuple[Gpu, ...]
"""GPUs of a virtual worker."""


@dataclass(frozen=True)
class PipelineCluster:
    """Nodes with GPUs of one or several types.

    Parameters
    ----------
    nodes : tuple of tuple of str
        Types of the GPUs of each node.
    memory_bytes : mapping
        Memory of one GPU of each type.
    links : Links
        Links, equal for all pairs of GPUs within a node and for all pairs of nodes.
    context_bytes : mapping
        Memory that the framework takes on a GPU before it holds any layer, by type; none if not given.
    server_bytes_per_s : float
        Bytes of updates that the parameter server of a node adds to its weights per second.
    """

    nodes: tuple[tuple[str, ...], ...]
    memory_bytes: Mapping[str, int]
    links: Links
    context_bytes: Mapping[str, int] = field(default_factory=dict)
    server_bytes_per_s: float = math.inf

    @property
    def gpus(self) -> Group:
        """All GPUs, node by node."""
        return tuple(gpu for node in range(len(self.nodes)) for gpu in self.on(node))

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """GPU types of the cluster, sorted."""
        return tuple(sorted({gpu_type for types in self.nodes for gpu_type in types}))

    @property
    def free_bytes(self) -> Mapping[str, int]:
        """Memory of one GPU of each type without the framework's context, at least 0."""
        return {
            name: max(0, size - self.context_bytes.get(name, 0)) for name, size in self.memory_bytes.items()
        }

    def on(self, node: int) -> Group:
        """Return the GPUs of a node."""
        return tuple((node, gpu) for gpu in range(len(self.nodes[node])))

    def type_of(self, gpu: Gpu) -> str:
        """Return the type of a GPU."""
        return self.nodes[gpu[0]][gpu[1]]

    def kinds(self, group: Group) -> list[Group]:
        """Return the GPUs of a group by node and type; GPUs of the same kind are interchangeable."""
        found: dict[tuple[int, str], list[Gpu]] = {}
        for gpu in sorted(group):
            found.setdefault((gpu[0], self.type_of(gpu)), []).append(gpu)
        return [tuple(gpus) for gpus in found.values()]
