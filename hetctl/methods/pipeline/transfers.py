"""Links between nodes and parameter servers, which virtual workers share, on a virtual clock (HetPipe, 8.1).

A link or server takes requests one after another. Activations are requested as a whole; the parameters of
a wave in parts, each after the one before, so that activations and parameters take turns. What a virtual
worker transfers depends on the placement of the weights on parameter servers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import accumulate, count, pairwise
from typing import NamedTuple

from hetctl.methods.pipeline.stage_costs import Gpu, LayerProfile, Links, PipelineCluster
from hetctl.methods.pipeline.stages import VirtualWorker, stages_of_layers
from hetctl.model.plan import LOCAL
from hetctl.model.values import dataclass

SharedResource = tuple[str, int]
"""Something shared: its kind, one of `OUT`, `IN` and `SERVER`, and its node."""
OUT, IN, SERVER = "out", "in", "server"
PARTS = 4
"""Parts in which the parameters of a wave are transferred."""


class Leg(NamedTuple):
    """Seconds on a resource that is idle; None for time that nothing shares, such as a GPU's own link."""

    resource: SharedResource | None
    seconds: float


Lane = tuple[Leg, ...]
"""Legs of the same bytes, one after another."""


class Receiving(NamedTuple):
    """Seconds on idle links for the data that a pass waits for, and the links between nodes that carry it."""

    resources: tuple[SharedResource, ...]
    seconds: float


@dataclass(frozen=True)
class Traffic:
    """Use of links and servers by a virtual worker.

    Parameters
    ----------
    activations, gradients : tuple of Receiving
        Data that the forward and the backward pass of each stage receive from other nodes; empty if no
        stage receives any.
    push, pull : tuple of Lane
        Lanes of the updates of a wave to the servers, and of the weights from them; all run in parallel.
    """

    activations: tuple[Receiving, ...] = ()
    gradients: tuple[Receiving, ...] = ()
    push: tuple[Lane, ...] = ()
    pull: tuple[Lane, ...] = ()

    @property
    def push_s(self) -> float:
        """Seconds to send a wave if nothing else uses links and servers."""
        return _longest_s(self.push)

    @property
    def pull_s(self) -> float:
        """Seconds to fetch the weights if nothing else uses links and servers."""
        return _longest_s(self.pull)

    @cached_property
    def by_minibatch(self) -> Mapping[SharedResource, float]:
        """Seconds of each minibatch on each resource."""
        received = (*self.activations, *self.gradients)
        return _total((resource, one.seconds) for one in received for resource in one.resources)

    @cached_property
    def is_shared(self) -> bool:
        """True if it uses anything that others use."""
        return bool(self.by_minibatch) or any(loads(lanes) for lanes in (self.push, self.pull))


ALONE = Traffic()
"""Nothing is transferred."""


def at_once_s(lanes: Sequence[Sequence[Lane]]) -> float:
    """Return the seconds for the lanes of all virtual workers if these begin together."""
    total = _total(use for own in lanes for use in loads(own).items())
    return max((_with_others_s(lane, total) for own in lanes for lane in own), default=0.0)


def _with_others_s(lane: Lane, total: Mapping[SharedResource, float]) -> float:
    alone_s = sum(leg.seconds for leg in lane)
    unshared_s = sum(leg.seconds for leg in lane if leg.resource is None)
    return max([alone_s, *(unshared_s + total[leg.resource] for leg in lane if leg.resource)])


def loads(lanes: Iterable[Lane]) -> Mapping[SharedResource, float]:
    """Return the seconds on each resource."""
    return _total((leg.resource, leg.seconds) for lane in lanes for leg in lane if leg.resource)


def _total(used: Iterable[tuple[SharedResource, float]]) -> dict[SharedResource, float]:
    total: dict[SharedResource, float] = defaultdict(float)
    for resource, seconds in used:
        total[resource] += seconds
    return total


def _longest_s(lanes: Iterable[Lane]) -> float:
    return max((sum(leg.seconds for leg in lane) for lane in lanes), default=0.0)


def load_s(workers: Iterable[Traffic], in_flight: int, distance: int) -> float:
    """Return the seconds of the busiest resource for a minibatch of each virtual worker: a least period.

    Weights are fetched once in up to D + 1 waves.
    """
    used: dict[SharedResource, float] = defaultdict(float)
    for worker in workers:
        for share, by_resource in (
            (1.0, worker.by_minibatch),
            (1 / in_flight, loads(worker.push)),
            (1 / in_flight / (distance + 1), loads(worker.pull)),
        ):
            for resource, seconds in by_resource.items():
                used[resource] += share * seconds
    return max(used.values(), default=0.0)


class Network:
    """A virtual clock with all resources: calls in the order of their times, then in that of their entry."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = count()
        self._free_s: dict[SharedResource, float] = defaultdict(float)

    def at(self, at_s: float, call: Callable[[float], None]) -> None:
        """Call a function at a time, with that time."""
        heappush(self._calls, (at_s, next(self._number), call))

    def step(self) -> None:
        """Make the next call."""
        at_s, _, call = heappop(self._calls)
        call(at_s)

    def end_s(self, resources: Sequence[SharedResource], at_s: float, seconds: float) -> float:
        """Use resources together for some time, as soon as all are free; return the end."""
        end_s = max(at_s, *(self._free_s[resource] for resource in resources)) + seconds
        for resource in resources:
            self._free_s[resource] = end_s
        return end_s

    def carry(self, lanes: Sequence[Lane], at_s: float, done: Callable[[float], None]) -> None:
        """Run lanes in parallel, and call a function at the end of the last."""
        left = len(lanes)

        def lane_done(now_s: float) -> None:
            nonlocal left
            left -= 1
            if not left:
                done(now_s)

        for lane in lanes:
            # All legs once for each part: between two parts the activations of others have their turn.
            self._leg(lane * PARTS, 0, lane_done, at_s)
        if not lanes:
            done(at_s)

    def _leg(self, legs: Lane, at: int, done: Callable[[float], None], now_s: float) -> None:
        if at == len(legs):
            done(now_s)
            return
        resource, seconds = legs[at]
        part_s = seconds / PARTS
        end_s = self.end_s((resource,), now_s, part_s) if resource else now_s + part_s
        self.at(end_s, partial(self._leg, legs, at + 1, done))


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
    activations, gradients = [NOTHING], []
    for before, after in pairwise(worker.stages):
        seconds = layers.layers[before.last].activation_bytes * links.inter_s_per_byte
        forward = Receiving(((OUT, before.node), (IN, after.node)), seconds)
        backward = Receiving(((OUT, after.node), (IN, before.node)), seconds)
        activations.append(NOTHING if before.node == after.node else forward)
        gradients.append(NOTHING if before.node == after.node else backward)
    if not any(one.resources for one in activations):
        return (), ()
    return tuple(activations), (*gradients, NOTHING)


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
