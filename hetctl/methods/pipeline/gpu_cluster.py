"""The GPUs that pipelines are planned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetctl.methods.pipeline.communication import Links

Gpu = tuple[int, int]
"""The node, and the GPU in it; both counted from 0."""
Group = tuple[Gpu, ...]
"""The GPUs of a virtual worker."""


@dataclass(frozen=True)
class PipelineCluster:
    """Nodes with GPUs, perhaps of several types.

    Parameters
    ----------
    nodes : tuple of tuple of str
        The types of the GPUs of each node.
    memory_bytes : mapping
        Of one GPU of each type.
    links : Links
        The same between all GPUs of a node, and between all nodes.
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
        """The types there are, sorted."""
        return tuple(sorted({gpu_type for types in self.nodes for gpu_type in types}))

    def on(self, node: int) -> Group:
        """Return the GPUs of a node."""
        return tuple((node, gpu) for gpu in range(len(self.nodes[node])))

    def type_of(self, gpu: Gpu) -> str:
        """Return the type of a GPU."""
        return self.nodes[gpu[0]][gpu[1]]

    def kinds(self, group: Group) -> list[Group]:
        """Return the GPUs of a group by node and type: those of a kind can stand for each other."""
        found: dict[tuple[int, str], list[Gpu]] = {}
        for gpu in sorted(group):
            found.setdefault((gpu[0], self.type_of(gpu)), []).append(gpu)
        return [tuple(gpus) for gpus in found.values()]
