"""What it takes to send a wave: whose weights lie where, and which links carry them (HetPipe, 8.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.stages import Stage, VirtualWorker

LOCAL, ROUND_ROBIN = "local", "round-robin"
PLACEMENTS = (ROUND_ROBIN, LOCAL)
"""Of layers on the parameter servers, one on each node."""


@dataclass(frozen=True)
class Waves:
    """How virtual workers are synchronised (WSP).

    Parameters
    ----------
    distance : int
        Clock distance D.
    placement : str
        One of `PLACEMENTS`.
    """

    distance: int = 0
    placement: str = LOCAL


def synchronisation_s(
    workers: Sequence[VirtualWorker], layers: LayerProfile, cluster: PipelineCluster, placement: str
) -> float:
    """Return how long a wave takes to the parameter servers if all virtual workers send one at once.

    Each node sends and receives over one link, and each GPU over its own to the server on its node.
    Fetching the weights takes as long, the other way.
    """
    sizes = [float(size) for size in layers.parameter_bytes]
    servers = _servers(workers, sizes, len(cluster.nodes), placement)
    sent, received = ([0.0] * len(cluster.nodes) for _ in range(2))
    for stage, layer in _placed(workers):
        if servers[layer] != stage.node:
            sent[stage.node] += sizes[layer]
            received[servers[layer]] += sizes[layer]
    within = max(sum(sizes[stage.first : stage.last + 1]) for worker in workers for stage in worker.stages)
    return max(
        cluster.links.seconds(max(*sent, *received), same_node=False),
        cluster.links.seconds(within, same_node=True),
    )


def _servers(
    workers: Sequence[VirtualWorker], sizes: Sequence[float], nodes: int, placement: str
) -> list[int]:
    """Return the node whose server has each layer.

    ``round-robin``: one after the other, of those with parameters, as TensorFlow places variables.
    ``local``: where most virtual workers have the layer, evenly if several nodes are as good. With Equal
    Distribution all have it on one node, so that nothing crosses the network.
    """
    if placement == "local":
        return _nearest_servers(workers, sizes, nodes)
    with_parameters = accumulate((size > 0 for size in sizes), initial=0)
    return [count % nodes for count, _ in zip(with_parameters, sizes, strict=False)]


def _nearest_servers(workers: Sequence[VirtualWorker], sizes: Sequence[float], nodes: int) -> list[int]:
    votes = [[0] * nodes for _ in sizes]
    for stage, layer in _placed(workers):
        votes[layer][stage.node] += 1
    servers, load = [], [0.0] * nodes
    for counts, size in zip(votes, sizes, strict=True):
        servers.append(max(range(nodes), key=lambda node: (counts[node], -load[node])))
        load[servers[-1]] += size
    return servers


def _placed(workers: Sequence[VirtualWorker]) -> Iterator[tuple[Stage, int]]:
    """Yield every layer of every virtual worker with its stage."""
    for worker in workers:
        for stage in worker.stages:
            for layer in range(stage.first, stage.last + 1):
                yield stage, layer
