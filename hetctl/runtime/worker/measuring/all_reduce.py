"""All-reduces of groups: the groups to form, the reports of their ranks, and comparable bandwidths."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from hetctl.model.plan import Placement
from hetctl.model.site import Node
from hetctl.model.values import dataclass
from hetctl.runtime.frameworks import GLOO, NCCL

NAME = "all-reduce"
GB = 1e9
SIZE_BYTES = {NCCL: 64 * 2**20, GLOO: 8 * 2**20}
"""Bytes per rank: enough to saturate links of that kind, few enough for slow ones."""


@dataclass(frozen=True)
class RankTime:
    """Result of one rank of a group.

    Parameters
    ----------
    group : str
        Name of the group's task.
    gpu : int
        Number of the rank's GPU or slot.
    backend : str
        `NCCL` or `GLOO`.
    bytes : int
        Size of each rank's array.
    median_s : float
        Median time of one all-reduce in seconds.
    unreached : tuple of int
        GPUs of its node known to have no direct access from its GPU.
    links : int or None
        Number of active NVLinks of its GPU; None if unknown.
    """

    group: str
    node: str
    gpu: int
    backend: str
    bytes: int
    median_s: float
    unreached: tuple[int, ...] = ()
    links: int | None = None


@dataclass(frozen=True)
class AllReduce:
    """Speed of a group's all-reduce.

    Parameters
    ----------
    nodes : tuple of str
        Nodes of the group. With several, the slowest link, one between nodes, determines the speed.
    gpus : int
        Number of GPUs on all nodes.
    median_s : float
        Time of one all-reduce: the ranks' medians, averaged as nccl-tests do.
    bus_gb_per_s : float
        Bus bandwidth in 1e9 bytes/s, as in function `bus_gb_per_s`.
    """

    framework: str
    backend: str
    nodes: tuple[str, ...]
    gpus: int
    bytes: int
    median_s: float
    bus_gb_per_s: float


def groups_on(nodes: Sequence[Node]) -> Iterator[tuple[str, tuple[Placement, ...]]]:
    """Yield, with names, a group for each node with several GPUs, and one of all GPUs of several nodes."""
    for node in nodes:
        if len(node.gpus) > 1:
            yield f"{NAME}-{node.name}", all_gpus([node])
    if len(nodes) > 1:
        yield NAME, all_gpus(nodes)


def all_gpus(nodes: Sequence[Node]) -> tuple[Placement, ...]:
    """Return all GPUs of some nodes."""
    return tuple(Placement(node.name, node.gpus) for node in nodes)


def speed_of(framework: str, ranks: Sequence[RankTime]) -> AllReduce:
    """Return the speed of a group from the reports of all its ranks."""
    nodes = tuple(dict.fromkeys(rank.node for rank in ranks))
    seconds = statistics.fmean(rank.median_s for rank in ranks)
    backend, size = ranks[0].backend, ranks[0].bytes
    bandwidth = bus_gb_per_s(size, len(ranks), seconds)
    return AllReduce(framework, backend, nodes, len(ranks), size, seconds, bandwidth)


def bus_gb_per_s(size_bytes: int, ranks: int, seconds: float) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s: bytes/s times ``2 (n - 1) / n``.

    With any algorithm, each rank has to send and receive this many bytes per byte of the result. So the
    figure compares with the bandwidth of a link, and between groups of different size.
    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md, "AllReduce".

    Parameters
    ----------
    size_bytes : int
        Size of each rank's array.
    ranks : int
        Number of ranks n, at least 2.
    """
    return size_bytes / seconds * 2 * (ranks - 1) / ranks / GB
