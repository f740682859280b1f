"""Profile of a network by layer, the basis of partitions (HetPipe, section 7), and its coarse version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

UNNAMED = ""
"""GPU type of a profile that does not name the type it was measured on."""


@dataclass(frozen=True)
class Layer:
    """A layer; times and sizes are those of one minibatch.

    Parameters
    ----------
    forward_s, backward_s : mapping
        Seconds of one pass by GPU type.
    activation_bytes : int
        Activations sent to the next stage if the network is cut after this layer; the gradients sent back
        have the same size.
    parameter_bytes : int
        Size of one version of its weights.
    held_bytes : int or None
        Data kept on the GPU from the forward to the backward pass; None for `activation_bytes`.
    workspace_bytes : int
        Memory that only one pass of the layer uses, and leaves to the next layer.
    optimizer_bytes : int or None
        State that the optimizer keeps for its weights; None for `parameter_bytes`: SGD with momentum, which
        trains the networks of HetPipe.
    """

    name: str
    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]
    activation_bytes: int
    parameter_bytes: int
    held_bytes: int | None = None
    workspace_bytes: int = 0
    optimizer_bytes: int | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return self.parameter_bytes if self.optimizer_bytes is None else self.optimizer_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that each minibatch in flight keeps on the GPU for the backward pass."""
        return self.activation_bytes if self.held_bytes is None else self.held_bytes


@dataclass(frozen=True)
class LayerProfile:
    """Layers of a network in the order of computation, at least one."""

    layers: tuple[Layer, ...]

    @property
    def gpu_types(self) -> frozenset[str]:
        """GPU types on which all layers were measured."""
        return frozenset.intersection(
            *(frozenset(layer.forward_s) & frozenset(layer.backward_s) for layer in self.layers)
        )

    def forward_s(self, gpu_type: str) -> NDArray[np.float64]:
        """Return the seconds of the forward passes, shape (layers,)."""
        return np.array([layer.forward_s[gpu_type] for layer in self.layers])

    def backward_s(self, gpu_type: str) -> NDArray[np.float64]:
        """Return the seconds of the backward passes, shape (layers,)."""
        return np.array([layer.backward_s[gpu_type] for layer in self.layers])

    @property
    def activation_bytes(self) -> NDArray[np.int64]:
        """Bytes that cross a cut after each layer, shape (layers,)."""
        return np.array([layer.activation_bytes for layer in self.layers], dtype=np.int64)

    @property
    def input_bytes(self) -> int:
        """Most bytes of the network's inputs: what the first layer keeps beside its outputs.

        A measured first layer keeps the inputs, too; files that do not say what is kept give 0.
        """
        first = self.layers[0]
        return max(0, first.kept_bytes - first.activation_bytes)

    @property
    def parameter_bytes(self) -> NDArray[np.int64]:
        """Bytes of one version of each layer's weights, shape (layers,)."""
        # Explicitly 64 bits: sums of bytes exceed 32 bits, the default width on some systems.
        return np.array([layer.parameter_bytes for layer in self.layers], dtype=np.int64)

    @property
    def kept_bytes(self) -> NDArray[np.int64]:
        """Bytes of each layer that each minibatch in flight keeps, shape (layers,)."""
        return np.array([layer.kept_bytes for layer in self.layers], dtype=np.int64)

    @property
    def workspace_bytes(self) -> NDArray[np.int64]:
        """Bytes of each layer's workspace, shape (layers,)."""
        return np.array([layer.workspace_bytes for layer in self.layers], dtype=np.int64)

    @property
    def slot_bytes(self) -> NDArray[np.int64]:
        """Bytes of the optimizer's state of each layer, shape (layers,)."""
        return np.array([layer.slot_bytes for layer in self.layers], dtype=np.int64)

    def derived(self, time_ratios: Mapping[str, float], measured_on: str = UNNAMED) -> LayerProfile:
        """Return the profile for other GPU types, from the ratios of their times to the measured ones."""
        return LayerProfile(
            tuple(
                replace(
                    layer,
                    forward_s={t: ratio * layer.forward_s[measured_on] for t, ratio in time_ratios.items()},
                    backward_s={t: ratio * layer.backward_s[measured_on] for t, ratio in time_ratios.items()},
                )
                for layer in self.layers
            )
        )


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
        workspace_bytes=max(layer.workspace_bytes for layer in layers),
        optimizer_bytes=sum(layer.slot_bytes for layer in layers),
    )


def _total(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(of_layer[name] for of_layer in seconds) for name in seconds[0]}
