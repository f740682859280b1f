"""Memory of nodes for waves and parameter servers (HetPipe, section 5), as `hetctl.runtime` has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hetctl.methods.pipeline.gpu_cluster import Gpu
from hetctl.methods.pipeline.stages import VirtualWorker, stages_of_layers

SLOTS = 2
"""Messages from one rank to another that are in the memory of their node at a time."""


def client_versions(distance: int) -> int:
    """Return how many times its weights a stage has in the node's memory for waves, at most.

    The weights of its last push, the updates of its own last D waves, and the global weights that arrive.
    """
    return distance + 2


def server_versions(workers: int, distance: int) -> int:
    """Return how many times its weights a parameter server has, at most.

    The slowest of V virtual workers reads the global weights D waves after they exist, and a new version is
    there before the oldest goes: D + 2 versions. Each of the others is ahead of it by up to D + 1 waves,
    which the server cannot add yet.
    """
    return distance + 2 + (workers - 1) * (distance + 1)


def wave_bytes(
    workers: Sequence[VirtualWorker], sizes: Sequence[int], servers: Sequence[Gpu], distance: int
) -> dict[int, int]:
    """Return the most bytes that waves and parameter servers take of each node's memory, by node.

    Empty for one virtual worker, which has neither.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of the weights of each layer.
    servers : sequence of (node, GPU)
        Rank with the parameter server of each layer.
    distance : int
        Clock distance D.
    """
    found: defaultdict[int, int] = defaultdict(int)
    if len(workers) == 1:
        return dict(found)
    for stage, layer in stages_of_layers(workers):
        found[stage.node] += client_versions(distance) * sizes[layer]
    for (node, _), size in zip(servers, sizes, strict=True):
        found[node] += server_versions(len(workers), distance) * size
    for (node, _), size in _largest_messages(workers, sizes, servers).items():
        found[node] += 2 * SLOTS * size
    return dict(found)


def _largest_messages(
    workers: Sequence[VirtualWorker], sizes: Sequence[int], servers: Sequence[Gpu]
) -> dict[tuple[int, tuple[int, int]], int]:
    """Return the bytes of the largest layer between two ranks of a node, by node and their GPUs.

    Updates go one way and weights the other, through slots of their own.
    """
    found: dict[tuple[int, tuple[int, int]], int] = {}
    for stage, layer in stages_of_layers(workers):
        node, gpu = servers[layer]
        if stage.node == node and stage.gpu != gpu:
            pair = node, (stage.gpu, gpu)
            found[pair] = max(found.get(pair, 0), sizes[layer])
    return found
