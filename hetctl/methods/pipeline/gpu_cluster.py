"""Cluster of GPUs for which pipelines are planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """

    nodes: tuple[tuple[str, ...], ...]
    memory_bytes: Mapping[str, int]
    links: Links

    @property
    def gpus(self) -> Group:
        """All GPUs, node by node."""
        return tuple(gpu for node in range(len(self.nodes)) for gpu in self.on(node))

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """GPU types of the cluster, sorted."""
        return tuple(sorted({gpu_type for types in self.nodes for gpu_type in types}))

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
