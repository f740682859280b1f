"""Stages of virtual workers: computation, transfers, and memory of each GPU and node.

The memory of nodes holds minibatches on their way between stages, waves and parameter servers (HetPipe,
section 5). It is counted as the runtime takes it: the most bytes of each node, GPUs left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from hetctl.methods.pipeline.partition import Cut
from hetctl.methods.pipeline.stage_costs import (
    Gpu,
    LayerProfile,
    PipelineCluster,
    StageCosts,
    minibatches_held,
)
from hetctl.model.pipelines import Stage
from hetctl.model.values import dataclass

Passes = tuple[tuple[float, float], ...]
"""Seconds of the forward and the backward task of each stage, including the transfer of their inputs."""


@dataclass(frozen=True)
class VirtualWorker:
    """GPUs that train the whole network as a pipeline.

    Parameters
    ----------
    stages : tuple of Stage
        Stages in the order of the layers; a GPU that would slow down the pipeline has none.
    in_flight : int
        Minibatches in the pipeline at a time, N_m in the paper.
    """

    stages: tuple[Stage, ...]
    in_flight: int

    @property
    def bottleneck_s(self) -> float:
        """Time of the slowest stage in seconds."""
        return max(stage.total_s for stage in self.stages)

    @property
    def passes(self) -> Passes:
        """Seconds of the forward and the backward task of each stage."""
        return tasks([(stage.forward_s, stage.backward_s, stage.receive_s) for stage in self.stages])


def tasks(seconds: Sequence[tuple[float, float, float]]) -> Passes:
    """Return both tasks of each stage from its forward, backward and receive times.

    The gradients that a stage receives have the size of the activations of the next stage, and the first
    stage receives no activations; so the sum of both times is sufficient to separate them.
    """
    found = []
    activations_s = 0.0
    for forward_s, backward_s, receive_s in seconds:
        gradients_s = max(0.0, receive_s - activations_s)
        found.append((activations_s + forward_s, backward_s + gradients_s))
        activations_s = gradients_s
    return tuple(found)


def stages_of_layers(workers: Iterable[VirtualWorker]) -> Iterator[tuple[Stage, int]]:
    """Yield every layer of every virtual worker with its stage."""
    for worker in workers:
        for stage in worker.stages:
            for layer in range(stage.first, stage.last + 1):
                yield stage, layer


def virtual_worker(
    profile: LayerProfile, cluster: PipelineCluster, costs: StageCosts, cuts: Sequence[Cut], in_flight: int
) -> VirtualWorker:
    """Return a virtual worker with the times and bytes of the stages of a partition."""
    crossing = [costs.receive_s[int(a.gpu[0] == b.gpu[0]), b.first] for a, b in pairwise(cuts)]
    activations = [0.0, *crossing]
    stages = []
    for at, (first, last, gpu) in enumerate(cuts):
        gpu_type, layers = cluster.type_of(gpu), slice(first, last + 1)
        place = len(cuts) - 1 - at, in_flight
        again = bool(costs.recomputes(gpu_type, *place)[first, last])
        forward_s = float(profile.forward_s(gpu_type)[layers].sum())
        backward_s = float(profile.backward_s(gpu_type)[layers].sum()) + again * forward_s
        receive_s = float(sum(activations[at : at + 2]))
        stage = Stage(
            first=first,
            last=last,
            node=gpu[0],
            gpu=gpu[1],
            gpu_type=gpu_type,
            forward_s=forward_s,
            backward_s=backward_s,
            receive_s=receive_s,
            bytes=int(costs.bytes(*place, recomputes=again)[first, last]),
            recomputes=again,
            first_layer=profile.layers[first].name,
            last_layer=profile.layers[last].name,
            total_s=forward_s + backward_s + receive_s,
            memory_bytes=cluster.free_bytes[gpu_type],
        )
        stages.append(stage)
    return VirtualWorker(tuple(stages), in_flight)


SLOTS = 2
"""Most messages from one rank to another that are in their node's memory at a time."""


def wave_copies(distance: int) -> int:
    """Return the most copies, as large as its weights, that a stage has in the node's memory for waves.

    The weights of its last push, the updates of its own last D waves, and the global weights that arrive.
    """
    return distance + 2


def server_copies(workers: int, distance: int) -> int:
    """Return the most copies, as large as its weights, that a parameter server has.

    The slowest of V virtual workers reads the global weights D waves after they exist, and a new version is
    there before the oldest goes: D + 2 versions. Each of the others is ahead of it by up to D + 1 waves,
    which the server cannot add yet.
    """
    return distance + 2 + (workers - 1) * (distance + 1)


def node_bytes(
    profile: LayerProfile, workers: Sequence[VirtualWorker], servers: Sequence[Gpu], distance: int
) -> dict[int, int]:
    """Return the most bytes that the pipeline of a member takes of each node's memory, by node.

    Parameters
    ----------
    servers : sequence of (node, GPU)
        Rank with the parameter server of each layer; not used for one virtual worker.
    distance : int
        Clock distance D.
    """
    found: Counter[int] = Counter(wave_bytes(workers, profile.parameter_bytes.tolist(), servers, distance))
    for worker in workers:
        found.update(passing_bytes(profile, worker))
    return dict(found)


def passing_bytes(profile: LayerProfile, worker: VirtualWorker) -> dict[int, int]:
    """Return the most bytes that minibatches of a virtual worker take of each node's memory, by node.

    The first stage has the inputs of all N_m minibatches: they wait for forward passes, or are kept to
    recompute. Between two stages a minibatch is at one cut at a time, as activations or as gradients. A stage
    that recomputes keeps its inputs where they arrive. Two ranks of a node share slots, own ones for each
    direction. Tensors that ranks open on GPUs count as if they went through the node's memory.
    """
    found: Counter[int] = Counter()
    on_their_way: dict[int, int] = {}
    found[worker.stages[0].node] += worker.in_flight * profile.input_bytes
    sizes, stages = profile.activation_bytes.tolist(), len(worker.stages)
    for at, (before, after) in enumerate(pairwise(worker.stages), start=1):
        size = sizes[before.last]
        for node in (before.node, after.node):
            on_their_way[node] = max(on_their_way.get(node, 0), size)
        if before.node == after.node:
            found[after.node] += 2 * SLOTS * size
        if after.recomputes:
            found[after.node] += minibatches_held(stages - 1 - at, worker.in_flight) * size
    for node, size in on_their_way.items():
        found[node] += worker.in_flight * size
    return dict(found)


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
        found[stage.node] += wave_copies(distance) * sizes[layer]
    for (node, _), size in zip(servers, sizes, strict=True):
        found[node] += server_copies(len(workers), distance) * size
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
