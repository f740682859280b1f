"""Links between GPUs: given or measured."""

from __future__ import annotations

from dataclasses import dataclass

Point = tuple[float, float]
"""Size of a message in bytes, and its transfer time in seconds."""


@dataclass(frozen=True)
class IntraNode:
    """Links within a node: peak bandwidth, with the share of it that is reached or measured points."""

    bytes_per_s: float
    scaling: float | None = None
    points: tuple[Point, ...] = ()


@dataclass(frozen=True)
class InterNode:
    """Links between nodes: latency and bandwidth, or measured points."""

    latency_s: float | None = None
    bytes_per_s: float | None = None
    points: tuple[Point, ...] = ()


@dataclass(frozen=True)
class NodeLinks:
    """Links of a cluster: the same for all pairs of GPUs in a node, and for all pairs of nodes."""

    intra_node: IntraNode
    inter_node: InterNode
