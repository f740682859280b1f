"""Transfers of virtual workers, by the placement of weights on parameter servers (HetPipe, 8.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hetctl.methods.pipeline.stage_costs import Gpu, LayerProfile, Links, PipelineCluster
from hetctl.methods.pipeline.stages import VirtualWorker, stages_of_layers
from hetctl.methods.pipeline.transfers import IN, OUT, SERVER, Lane, Leg, Receiving, Traffic
from hetctl.model.pipelines import Stage
from hetctl.model.plan import LOCAL

Counts = defaultdict[int, float]
"""Bytes by node."""
NOTHING = Receiving((), 0.0)


@dataclass(frozen=True)
class Waves:
    """Synchronisation of virtual workers (WSP).

    Parameters
    ----------
    distance : int
        Clock distance D.
    ps_placement : str
        Placement of layers, one of `PS_PLACEMENTS`.
    """

    distance: int = 0
    ps_placement: str = LOCAL


def traffic_of(
    workers: Sequence[VirtualWorker], layers: LayerProfile, cluster: PipelineCluster, ps_placement: str
) -> tuple[Traffic, ...]:
    """Return how each virtual worker uses the links between nodes and the parameter servers (8.1).

    A node sends over one link and receives over another, activations as well as parameters. Each GPU has a
    link of its own to the server on its node. A server adds the updates that it receives to its weights.
    """
    sizes = [float(size) for size in layers.parameter_bytes]
    servers = server_nodes(workers, sizes, len(cluster.nodes), ps_placement)
    return tuple(_traffic(worker, layers, cluster, servers) for worker in workers)


def _traffic(
    worker: VirtualWorker, layers: LayerProfile, cluster: PipelineCluster, servers: Sequence[int]
) -> Traffic:
    sizes = [float(size) for size in layers.parameter_bytes]
    added, sent, received = (defaultdict[int, float](float) for _ in range(3))
    for stage, layer in stages_of_layers([worker]):
        added[servers[layer]] += sizes[layer]
        if servers[layer] != stage.node:
            sent[stage.node] += sizes[layer]
            received[servers[layer]] += sizes[layer]
    links = cluster.links
    most = max(sum(sizes[stage.first : stage.last + 1]) for stage in worker.stages)
    within = (Leg(None, links.seconds(most, same_node=True)),)
    adding = {node: size / cluster.server_bytes_per_s for node, size in added.items()}
    activations, gradients = _received(worker, layers, links)
    return Traffic(
        activations,
        gradients,
        push=_lanes([within, *_over(OUT, sent, links), *_to_servers(received, adding, links)]),
        pull=_lanes([within, *_over(OUT, received, links), *_over(IN, sent, links)]),
    )


def _received(
    worker: VirtualWorker, layers: LayerProfile, links: Links
) -> tuple[tuple[Receiving, ...], tuple[Receiving, ...]]:
    """Return the activations and the gradients of each stage that cross links between nodes."""
    crossing = [_receiving(before, after, layers, links) for before, after in pairwise(worker.stages)]
    if not any(forward.lines for forward, _ in crossing):
        return (), ()
    activations, gradients = zip(*crossing, strict=True)
    return (NOTHING, *activations), (*gradients, NOTHING)


def _receiving(
    before: Stage, after: Stage, layers: LayerProfile, links: Links
) -> tuple[Receiving, Receiving]:
    """Return the transfers of activations to a stage, and of gradients from it."""
    if before.node == after.node:
        return NOTHING, NOTHING
    seconds = layers.layers[before.last].activation_bytes * links.inter_s_per_byte
    forward = ((OUT, before.node), (IN, after.node))
    backward = ((OUT, after.node), (IN, before.node))
    return Receiving(forward, seconds), Receiving(backward, seconds)


def _over(kind: str, sizes: Counts, links: Links) -> list[Lane]:
    """Return the lanes over one direction of the links of nodes."""
    return [_link(kind, node, size, links) for node, size in sizes.items()]


def _link(kind: str, node: int, size: float, links: Links) -> Lane:
    return Leg(None, links.inter_latency_s), Leg((kind, node), size * links.inter_s_per_byte)


def _to_servers(received: Counts, applied: Mapping[int, float], links: Links) -> list[Lane]:
    """Return the lanes to the servers, which then apply the updates, their own node's included."""
    return [
        (
            *(_link(IN, node, received[node], links) if node in received else ()),
            Leg((SERVER, node), seconds),
        )
        for node, seconds in applied.items()
    ]


def _lanes(lanes: Iterable[Lane]) -> tuple[Lane, ...]:
    """Return the lanes that take any time, without legs that take none."""
    return tuple(taken for lane in lanes if (taken := tuple(leg for leg in lane if leg.seconds > 0)))


def server_nodes(
    workers: Sequence[VirtualWorker], sizes: Sequence[float], nodes: int, ps_placement: str
) -> list[int]:
    """Return the node of the parameter server of each layer.

    ``round-robin``: the layers with parameters go to the nodes in turn, as TensorFlow places variables.
    ``local``: a layer goes to the node on which most virtual workers have it; ties are balanced. With Equal
    Distribution all have it on the same node, so that nothing crosses the network.
    """
    if ps_placement == LOCAL:
        return _nearest_servers(workers, sizes, nodes)
    with_parameters = accumulate((size > 0 for size in sizes), initial=0)
    return [count % nodes for count, _ in zip(with_parameters, sizes, strict=False)]


def server_gpus(
    workers: Sequence[VirtualWorker], sizes: Sequence[float], nodes: int, ps_placement: str
) -> list[Gpu]:
    """Return the GPU whose rank serves each layer: one on its node that trains it, if there is one."""
    stages = [stage for worker in workers for stage in worker.stages]
    found = []
    for layer, node in enumerate(server_nodes(workers, sizes, nodes, ps_placement)):
        trains = [s for s in stages if s.node == node and s.first <= layer <= s.last]
        server = (trains or [s for s in stages if s.node == node] or stages)[0]
        found.append((server.node, server.gpu))
    return found


def _nearest_servers(workers: Sequence[VirtualWorker], sizes: Sequence[float], nodes: int) -> list[int]:
    votes = [[0] * nodes for _ in sizes]
    for stage, layer in stages_of_layers(workers):
        votes[layer][stage.node] += 1
    servers, load = [], [0.0] * nodes
    for counts, size in zip(votes, sizes, strict=True):
        # Ties go to the node with the least load so far, then to the first.
        servers.append(max(range(nodes), key=lambda node: (counts[node], -load[node])))
        load[servers[-1]] += size
    return servers
