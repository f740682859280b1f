"""All-reduces of a group: which groups are formed, what ranks report, and bandwidths that can be compared."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetctl.model.plan import Placement
from hetctl.model.site import Node
from hetctl.runtime.frameworks import GLOO, NCCL

NAME = "all-reduce"
GB = 1e9
SIZE_BYTES = {NCCL: 64 * 2**20, GLOO: 8 * 2**20}
"""Bytes of each rank: enough to keep links of that kind busy, and slow ones not for long."""


@dataclass(frozen=True)
class RankTime:
    """Result of one rank of a group.

    Parameters
    ----------
    group : str
        Name of the group's task.
    gpu : int
        Number of its own GPU or slot.
    backend : str
        `NCCL` or `GLOO`.
    size_bytes : int
        Of the numbers that each rank had.
    median_s : float
        What one all-reduce took.
    unreached : tuple of int
        GPUs of its node that its own has no direct access to, as far as is known.
    links : int or None
        NVLinks of its GPU that are in use; None: not known.
    """

    group: str
    node: str
    gpu: int
    backend: str
    size_bytes: int
    median_s: float
    unreached: tuple[int, ...] = ()
    links: int | None = None


@dataclass(frozen=True)
class AllReduce:
    """Speed of a group.

    Parameters
    ----------
    nodes : tuple of str
        One: its GPUs are all on that node. Several: the slowest of their links, which is one between nodes,
        makes the speed.
    gpus : int
        Of all nodes.
    median_s : float
        What one all-reduce took: each rank's median, averaged over the ranks as nccl-tests do.
    bus_gb_per_s : float
        Bus bandwidth, in 1e9 bytes/s, as `bus_gb_per_s` says.
    """

    framework: str
    backend: str
    nodes: tuple[str, ...]
    gpus: int
    size_bytes: int
    median_s: float
    bus_gb_per_s: float


def groups_on(nodes: Sequence[Node]) -> Iterator[tuple[str, tuple[Placement, ...]]]:
    """Yield, with its name, a group for each node with several GPUs, and of several nodes one of all GPUs."""
    for node in nodes:
        if len(node.gpus) > 1:
            yield f"{NAME}-{node.name}", all_gpus([node])
    if len(nodes) > 1:
        yield NAME, all_gpus(nodes)


def all_gpus(nodes: Sequence[Node]) -> tuple[Placement, ...]:
    """Return all GPUs of some nodes."""
    return tuple(Placement(node.name, node.gpus) for node in nodes)


def speed_of(framework: str, ranks: Sequence[RankTime]) -> AllReduce:
    """Return the speed of a group by what all its ranks found."""
    nodes = tuple(dict.fromkeys(rank.node for rank in ranks))
    seconds = statistics.fmean(rank.median_s for rank in ranks)
    backend, size = ranks[0].backend, ranks[0].size_bytes
    bandwidth = bus_gb_per_s(size, len(ranks), seconds)
    return AllReduce(framework, backend, nodes, len(ranks), size, seconds, bandwidth)


def bus_gb_per_s(size_bytes: int, ranks: int, seconds: float) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s: bytes/s times ``2 (n - 1) / n``.

    Each rank has to send and receive so many bytes for each byte of the result, whatever the algorithm. So
    the number can be compared with the bandwidth of a link, and between groups of different size.
    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md, "AllReduce".

    Parameters
    ----------
    size_bytes : int
        Of the numbers that each rank has.
    ranks : int
        n, at least 2.
    """
    return size_bytes / seconds * 2 * (ranks - 1) / ranks / GB
