"""Coarse version of a network with fewer layers, for searches over very many partitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.pipeline.layers import Layer, LayerProfile


def coarse(profile: LayerProfile, most: int) -> LayerProfile:
    """Return a profile with at most `most` layers; the neighbours with the least total time are merged.

    Each partition of the coarse network is also one of the network itself, with equal times and bytes.
    """
    of_types = [profile.forward_s(name) + profile.backward_s(name) for name in sorted(profile.gpu_types)]
    seconds: NDArray[np.float64] = np.sum(of_types, axis=0)
    bounds = np.arange(len(profile.layers) + 1)
    while len(bounds) > most + 1:
        at = int(np.argmin(seconds[:-1] + seconds[1:]))
        seconds[at] += seconds[at + 1]
        seconds = np.delete(seconds, at + 1)
        bounds = np.delete(bounds, at + 1)
    return LayerProfile(tuple(_merged(profile.layers[first:end]) for first, end in pairwise(bounds)))


def _merged(layers: Sequence[Layer]) -> Layer:
    return Layer(
        name=f"{layers[0].name} to {layers[-1].name}",
        forward_s=_total([layer.forward_s for layer in layers]),
        backward_s=_total([layer.backward_s for layer in layers]),
        activation_bytes=layers[-1].activation_bytes,
        parameter_bytes=sum(layer.parameter_bytes for layer in layers),
        held_bytes=sum(layer.kept_bytes for layer in layers),
    )


def _total(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(of_layer[name] for of_layer in seconds) for name in seconds[0]}
