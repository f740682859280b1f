"""Memory of nodes for pipelines, as `hetctl.runtime` takes it: most bytes by node, GPUs left out.

Minibatches on their way between stages, and waves and parameter servers (HetPipe, section 5).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from hetctl.methods.pipeline.gpu_cluster import Gpu
from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.stage_costs import minibatches_held
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

    The first stage has the inputs of all N_m, which wait for their forward passes, or are kept by a stage
    that recomputes. On its way between two stages a minibatch is at one cut at a time, as activations or as
    gradients. A stage that recomputes keeps its inputs where they came in. And two ranks of a node share
    slots, of which their messages of both directions have their own. Tensors that ranks open on GPUs are
    counted as if they went through the node's memory.
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
