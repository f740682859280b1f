"""HetPipe's networks and cluster, derived from public layer profiles and fitted to the paper's Table 4.

VGG-19 and ResNet-152 are PipeDream's profiles of VGG-16 and ResNet-50 with some of their blocks
repeated, as the networks are defined; times and activations are scaled from the profiles' 128 images to
the paper's 32. What the paper says of speeds is in its Table 4 only, so these are fitted:

- `TIME_SCALES`: a network's time on a TITAN V, so that 4 of them are as fast as the paper's one virtual
  worker (300 and 256 images/s with N_m = 5),
- `WHIMPY`: the times of G and Q, which by cores times clock (Table 1) would be longer, and `ALL_REDUCE`:
  least squares of the logarithms of Horovod's seven numbers,
- links between nodes: the throughput of VGG-19 with ED-local on all 16 GPUs.

Assumed, since the paper says nothing of them: `CONTEXT_BYTES` of TensorFlow on each GPU, half of the peak
bandwidth within a node, and `SERVER_BYTES_PER_S`. With that context ResNet-152 needs more than the 6 GB
of a G, as in the paper.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hetctl.app.pipeline import measured_profile
from hetctl.inputs.layer_profile import read_layers
from hetctl.methods.pipeline.stage_costs import Layer, LayerProfile, Links, PipelineCluster

PROFILED_BATCH, BATCH = 128, 32
GIB = 2**30
CORES_MHZ_GIB = {"V": (5120, 1455, 12), "R": (4608, 1770, 24), "G": (1920, 1680, 6), "Q": (1792, 1480, 8)}
"""TITAN V, TITAN RTX, GeForce RTX 2060 and Quadro P4000."""
MEMORY_BYTES = {name: gib * GIB for name, (_, _, gib) in CORES_MHZ_GIB.items()}
PLENTY = dict.fromkeys(MEMORY_BYTES, 1024 * GIB)
CONTEXT_BYTES = GIB // 2
SERVER_BYTES_PER_S = 5e9
TIME_SCALES = {"VGG-19": 1.34, "ResNet-152": 1.77}
WHIMPY = 0.75
"""Times of G and Q over those by cores times clock."""
TIME_RATIOS = {
    name: (WHIMPY if name in "GQ" else 1.0) * 5120 * 1455 / (cores * mhz)
    for name, (cores, mhz, _) in CORES_MHZ_GIB.items()
}
LINKS = Links(intra_bytes_per_s=15.75e9, intra_scaling=0.5, inter_latency_s=1e-4, inter_s_per_byte=1 / 3e9)
ALL_REDUCE = {"one node": 1.17e9, "several nodes": 0.84e9}
"""Bytes/s of Horovod's ring."""

Repeats = Mapping[tuple[str, str], int]
"""How often more a block comes, by its first and its last node."""
NETWORKS: dict[str, tuple[str, Repeats]] = {
    "VGG-19": (
        "vgg16.txt",
        {("node16", "node17"): 1, ("node23", "node24"): 1, ("node30", "node31"): 1},
    ),
    "ResNet-152": ("resnet50.txt", {("node50", "node59"): 4, ("node102", "node111"): 30}),
}
FILES = tuple(f"pipedream/{file}" for file, _ in NETWORKS.values())


def network(name: str, data: Path) -> LayerProfile:
    """Return a network on all four types of GPU."""
    file, repeats = NETWORKS[name]
    profile = measured_profile(read_layers(data / "pipedream" / file))
    for (first, last), times in repeats.items():
        profile = _repeated(profile, first, last, times)
    ratios = {kind: TIME_SCALES[name] * ratio for kind, ratio in TIME_RATIOS.items()}
    return _scaled(profile, BATCH / PROFILED_BATCH).derived(ratios)


def _repeated(profile: LayerProfile, first: str, last: str, times: int) -> LayerProfile:
    layers = profile.layers
    nodes = [layer.name.split()[0] for layer in layers]
    begin, end = nodes.index(first), nodes.index(last) + 1
    block = layers[begin:end]
    copies = [
        replace(layer, name=f"{layer.name} {number}") for number in range(2, times + 2) for layer in block
    ]
    return LayerProfile((*layers[:end], *copies, *layers[end:]))


def _scaled(profile: LayerProfile, factor: float) -> LayerProfile:
    return LayerProfile(
        tuple(
            replace(
                layer,
                forward_s={kind: seconds * factor for kind, seconds in layer.forward_s.items()},
                backward_s={kind: seconds * factor for kind, seconds in layer.backward_s.items()},
                activation_bytes=round(layer.activation_bytes * factor),
                held_bytes=round(layer.kept_bytes * factor),
            )
            for layer in profile.layers
        )
    )


def random_network(seed: int, layers: int = 60) -> LayerProfile:
    """Return a network of unlike layers, whose types of GPU are unlike in unlike ways."""
    draw = random.Random(seed)

    def layer(number: int) -> Layer:
        forward_s = {kind: draw.lognormvariate(-6, 1) * ratio for kind, ratio in TIME_RATIOS.items()}
        backward_s = {kind: draw.uniform(1, 3) * seconds for kind, seconds in forward_s.items()}
        size, weights = draw.lognormvariate(16, 1), draw.lognormvariate(14, 1)
        return Layer(f"layer {number}", forward_s, backward_s, round(size), round(weights))

    return LayerProfile(tuple(layer(number) for number in range(layers)))


def cluster(nodes: Sequence[str], memory_bytes: Mapping[str, int] = MEMORY_BYTES) -> PipelineCluster:
    """Return a cluster from its nodes' types: ``VVVV`` is a node of four."""
    context_bytes = dict.fromkeys(memory_bytes, CONTEXT_BYTES)
    return PipelineCluster(tuple(map(tuple, nodes)), memory_bytes, LINKS, context_bytes, SERVER_BYTES_PER_S)
