"""What each layer takes and needs: the profile that a network is partitioned by (HetPipe, section 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

UNNAMED = ""
"""The GPU type of a profile that does not say what it was measured on."""


@dataclass(frozen=True)
class Layer:
    """A layer, with one minibatch in it.

    Parameters
    ----------
    forward_s, backward_s : mapping
        Seconds of one pass by GPU type.
    activation_bytes : int
        What the next stage receives if the network is cut after this layer; as much comes back as
        gradients.
    parameter_bytes : int
        Of one version of its weights.
    held_bytes : int or None
        What stays on the GPU from the forward to the backward pass; None: `activation_bytes`.
    """

    name: str
    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]
    activation_bytes: int
    parameter_bytes: int
    held_bytes: int | None = None

    @property
    def kept_bytes(self) -> int:
        """Bytes that each minibatch in flight keeps on the GPU for the backward pass."""
        return self.activation_bytes if self.held_bytes is None else self.held_bytes


@dataclass(frozen=True)
class LayerProfile:
    """The layers of a network, in the order in which they are computed; at least one."""

    layers: tuple[Layer, ...]

    @property
    def gpu_types(self) -> frozenset[str]:
        """The types that all layers were measured on."""
        return frozenset.intersection(
            *(frozenset(layer.forward_s) & frozenset(layer.backward_s) for layer in self.layers)
        )

    def forward_s(self, gpu_type: str) -> NDArray[np.float64]:
        """Seconds of the forward passes, shape (layers,)."""
        return np.array([layer.forward_s[gpu_type] for layer in self.layers])

    def backward_s(self, gpu_type: str) -> NDArray[np.float64]:
        """Seconds of the backward passes, shape (layers,)."""
        return np.array([layer.backward_s[gpu_type] for layer in self.layers])

    @property
    def activation_bytes(self) -> NDArray[np.int64]:
        """What crosses a cut after each layer, shape (layers,)."""
        return np.array([layer.activation_bytes for layer in self.layers], dtype=np.int64)

    @property
    def parameter_bytes(self) -> NDArray[np.int64]:
        """Shape (layers,)."""
        return np.array([layer.parameter_bytes for layer in self.layers], dtype=np.int64)

    @property
    def kept_bytes(self) -> NDArray[np.int64]:
        """What each minibatch in flight keeps of each layer, shape (layers,)."""
        return np.array([layer.kept_bytes for layer in self.layers], dtype=np.int64)

    def derived(self, time_ratios: Mapping[str, float], measured_on: str = UNNAMED) -> LayerProfile:
        """Return the profile for other GPU types, by ratios of their times to the measured ones."""
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
