"""Time to send a wave, by the placement of weights and the links that carry them (HetPipe, 8.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.stages import Stage, VirtualWorker

LOCAL, ROUND_ROBIN = "local", "round-robin"
PLACEMENTS = (ROUND_ROBIN, LOCAL)
"""Placements of layers on the parameter servers, one server on each node."""


@dataclass(frozen=True)
class Waves:
    """Synchronisation of virtual workers (WSP).

    Parameters
    ----------
    distance : int
        Clock distance D.
    placement : str
        Placement of layers, one of `PLACEMENTS`.
    """

    distance: int = 0
    placement: str = LOCAL


def synchronisation_s(
    workers: Sequence[VirtualWorker], layers: LayerProfile, cluster: PipelineCluster, placement: str
) -> float:
    """Return the seconds of a wave to the parameter servers if all virtual workers send at once (8.1).

    Each node sends and receives over one link, and each GPU over its own link to the server on its node.
    Fetching the weights takes as long in the opposite direction.
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
    """Return the node of the parameter server of each layer.

    ``round-robin``: the layers with parameters go to the nodes in turn, as TensorFlow places variables.
    ``local``: a layer goes to the node on which most virtual workers have it; ties are balanced. With Equal
    Distribution all have it on the same node, so that nothing crosses the network.
    """
    if placement == LOCAL:
        return _nearest_servers(workers, sizes, nodes)
    with_parameters = accumulate((size > 0 for size in sizes), initial=0)
    return [count % nodes for count, _ in zip(with_parameters, sizes, strict=False)]


def _nearest_servers(workers: Sequence[VirtualWorker], sizes: Sequence[float], nodes: int) -> list[int]:
    votes = [[0] * nodes for _ in sizes]
    for stage, layer in _placed(workers):
        votes[layer][stage.node] += 1
    servers, load = [], [0.0] * nodes
    for counts, size in zip(votes, sizes, strict=True):
        # Ties go to the node with the least load so far, then to the first.
        servers.append(max(range(nodes), key=lambda node: (counts[node], -load[node])))
        load[servers[-1]] += size
    return servers


def _placed(workers: Sequence[VirtualWorker]) -> Iterator[tuple[Stage, int]]:
    """Yield every layer of every virtual worker with its stage."""
    for worker in workers:
        for stage in worker.stages:
            for layer in range(stage.first, stage.last + 1):
                yield stage, layer
