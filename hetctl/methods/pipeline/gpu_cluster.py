"""Cluster of GPUs for which pipelines are planned, with the links between them (HetPipe, section 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetctl.model.site import Point

Gpu = tuple[int, int]
"""Numbers of the node and of the GPU in it, both counted from 0."""
Group = tuple[Gpu, ...]
"""GPUs of a virtual worker."""


@dataclass(frozen=True)
class Links:
    """Fitted model of the links within a node and between nodes.

    Parameters
    ----------
    intra_bytes_per_s : float
        Peak bandwidth between GPUs of one node in bytes/s.
    intra_scaling : float
        Share of the peak that is reached (the paper's scaling-down constant).
    inter_latency_s, inter_s_per_byte : float
        Latency in seconds and seconds per byte between nodes, fitted to measurements.
    """

    intra_bytes_per_s: float
    intra_scaling: float
    inter_latency_s: float
    inter_s_per_byte: float

    def seconds(self, size: float, same_node: bool) -> float:
        """Return the transfer time of `size` bytes in seconds; 0 for no bytes."""
        if size <= 0:
            return 0.0
        if same_node:
            return size / (self.intra_bytes_per_s * self.intra_scaling)
        return self.inter_latency_s + size * self.inter_s_per_byte


def fit_scaling(bytes_per_s: float, points: Sequence[Point]) -> float:
    """Return the scaling-down constant of section 7, fitted by least squares."""
    peak_s = np.array([size for size, _ in points]) / bytes_per_s
    seconds = np.array([taken for _, taken in points])
    return float(peak_s @ peak_s / (peak_s @ seconds))


def fit_inter(points: Sequence[Point]) -> tuple[float, float]:
    """Return latency in s and seconds per byte by linear regression, neither below 0."""
    sizes, seconds = np.array(points, dtype=float).T
    offsets = sizes - sizes.mean()
    slope = float(offsets @ (seconds - seconds.mean()) / (offsets @ offsets))
    latency = float(seconds.mean() - slope * sizes.mean())
    # Noise of measurements may tilt the line; a negative bandwidth or latency would be exploited by a plan.
    if slope < 0:
        return float(seconds.mean()), 0.0
    if latency < 0:
        return 0.0, float(sizes @ seconds / (sizes @ sizes))
    return latency, slope


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
