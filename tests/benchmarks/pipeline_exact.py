"""Optimal pipelines of a few layers on a few GPUs, by exhaustive search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

from hetctl.methods.pipeline.stage_costs import Gpu, Group, LayerProfile, PipelineCluster, minibatches_held


def least_bottleneck_s(
    profile: LayerProfile, cluster: PipelineCluster, group: Group, in_flight: int
) -> float:
    """Try all orders of all subsets of the GPUs, and all cuts."""
    count = len(profile.layers)
    return min(
        slowest_s(profile, cluster, order, (0, *cuts), in_flight)
        for size in range(1, min(len(group), count) + 1)
        for order in permutations(group, size)
        for cuts in combinations(range(1, count), size - 1)
    )


def slowest_s(
    profile: LayerProfile,
    cluster: PipelineCluster,
    order: Sequence[Gpu],
    starts: Sequence[int],
    in_flight: int,
) -> float:
    """Return the seconds of the slowest stage; infinite if one does not fit."""
    found = []
    bounds = [*starts, len(profile.layers)]
    for at, gpu in enumerate(order):
        first, last = bounds[at], bounds[at + 1] - 1
        held = minibatches_held(len(order) - 1 - at, in_flight, is_first=not at)
        gpu_type = cluster.type_of(gpu)
        layers = profile.layers[first : last + 1]
        seconds = sum(layer.forward_s[gpu_type] + layer.backward_s[gpu_type] for layer in layers)
        free_bytes, is_last = cluster.free_bytes[gpu_type], at + 1 == len(order)
        if stage_needs(profile, first, last, held) > free_bytes:
            if is_last or stage_needs(profile, first, last, held, recomputes=True) > free_bytes:
                return math.inf
            seconds += sum(layer.forward_s[gpu_type] for layer in layers)
        if at:
            size = profile.layers[first - 1].activation_bytes
            seconds += cluster.links.seconds(size, order[at - 1][0] == gpu[0])
        if at + 1 < len(order):
            seconds += cluster.links.seconds(layers[-1].activation_bytes, order[at + 1][0] == gpu[0])
        found.append(seconds)
    return max(found)


def stage_needs(profile: LayerProfile, first: int, last: int, held: int, *, recomputes: bool = False) -> int:
    """Count the bytes of a stage one by one."""
    layers = profile.layers[first : last + 1]
    needed = max(layer.workspace_bytes for layer in layers)
    for layer in layers:
        # Updates of the wave, gradients of a minibatch, and the optimizer's state.
        needed += layer.parameter_bytes + layer.parameter_bytes + layer.slot_bytes
    for _ in range(held):
        needed += profile.layers[first - 1].activation_bytes if first else 0
        needed += sum(layer.parameter_bytes for layer in layers)
    for _ in range(1 if recomputes else held):
        needed += sum(layer.kept_bytes for layer in layers)
    return needed


def groupings(gpus: Group) -> Iterator[tuple[Group, ...]]:
    """Yield all ways to make disjoint groups of some of the GPUs."""
    if not gpus:
        yield ()
        return
    first, rest = gpus[0], gpus[1:]
    yield from groupings(rest)
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            left = tuple(gpu for gpu in rest if gpu not in others)
            for found in groupings(left):
                yield ((first, *others), *found)
