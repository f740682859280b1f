"""What is known of the links between GPUs: numbers, or what was measured."""

from __future__ import annotations

from dataclasses import dataclass

Point = tuple[float, float]
"""Bytes, and the seconds that they took."""


@dataclass(frozen=True)
class IntraNode:
    """Links within a node: peak bandwidth, and the part of it that is reached or what was measured."""

    bytes_per_s: float
    scaling: float | None = None
    points: tuple[Point, ...] = ()


@dataclass(frozen=True)
class InterNode:
    """Links between nodes: latency and bandwidth, or what was measured."""

    latency_s: float | None = None
    bytes_per_s: float | None = None
    points: tuple[Point, ...] = ()


@dataclass(frozen=True)
class NodeLinks:
    """The same between all GPUs of a node, and between all nodes."""

    intra_node: IntraNode
    inter_node: InterNode
