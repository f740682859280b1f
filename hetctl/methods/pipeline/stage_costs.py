"""Layers of a network and GPUs of a cluster, and the time and memory of every possible stage.

These are what partitions are planned from (HetPipe, sections 4 and 7).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from hetctl.model.site import Point
from hetctl.model.values import dataclass

Gpu = tuple[int, int]
"""Numbers of the node and of the GPU in it, both counted from 0."""
Group = tuple[Gpu, ...]
"""GPUs of a virtual worker."""


@dataclass(frozen=True)
class Links:
    """Fitted model of the links within a node and between nodes.

    Parameters
    ----------
    intra_bytes_per_s : float
        Peak bandwidth between GPUs of one node in bytes/s.
    intra_scaling : float
        Share of the peak that is reached (the paper's scaling-down constant).
    inter_latency_s, inter_s_per_byte : float
        Latency in seconds and seconds per byte between nodes, fitted to measurements.
    """

    intra_bytes_per_s: float
    intra_scaling: float
    inter_latency_s: float
    inter_s_per_byte: float

    def seconds(self, size: float, same_node: bool) -> float:
        """Return the transfer time of `size` bytes in seconds; 0 for no bytes."""
        if size <= 0:
            return 0.0
        if same_node:
            return size / (self.intra_bytes_per_s * self.intra_scaling)
        return self.inter_latency_s + size * self.inter_s_per_byte


def fit_scaling(bytes_per_s: float, points: Sequence[Point]) -> float:
    """Return the scaling-down constant of section 7, fitted by least squares."""
    peak_s = np.array([size for size, _ in points]) / bytes_per_s
    seconds = np.array([taken for _, taken in points])
    return float(peak_s @ peak_s / (peak_s @ seconds))


def fit_inter(points: Sequence[Point]) -> tuple[float, float]:
    """Return latency in s and seconds per byte by linear regression, neither below 0."""
    sizes, seconds = np.array(points, dtype=float).T
    offsets = sizes - sizes.mean()
    slope = float(offsets @ (seconds - seconds.mean()) / (offsets @ offsets))
    latency = float(seconds.mean() - slope * sizes.mean())
    # Noise may tilt the line, and plans would exploit a negative bandwidth or latency.
    if slope < 0:
        return float(seconds.mean()), 0.0
    if latency < 0:
        return 0.0, float(sizes @ seconds / (sizes @ sizes))
    return latency, slope


@dataclass(frozen=True)
class PipelineCluster:
    """Nodes with GPUs of one or several types.

    Parameters
    ----------
    nodes : tuple of tuple of str
        Types of the GPUs of each node.
    memory_bytes : mapping
        Memory of one GPU of each type.
    links : Links
        Links, equal for all pairs of GPUs within a node and for all pairs of nodes.
    context_bytes : mapping
        Memory that the framework takes on a GPU before it holds any layer, by type; none if not given.
    server_bytes_per_s : float
        Bytes of updates that the parameter server of a node adds to its weights per second.
    """

    nodes: tuple[tuple[str, ...], ...]
    memory_bytes: Mapping[str, int]
    links: Links
    context_bytes: Mapping[str, int] = field(default_factory=dict)
    server_bytes_per_s: float = math.inf

    @property
    def gpus(self) -> Group:
        """All GPUs, node by node."""
        return tuple(gpu for node in range(len(self.nodes)) for gpu in self.on(node))

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """GPU types of the cluster, sorted."""
        return tuple(sorted({gpu_type for types in self.nodes for gpu_type in types}))

    @property
    def free_bytes(self) -> Mapping[str, int]:
        """Memory of one GPU of each type without the framework's context, at least 0."""
        return {
            name: max(0, size - self.context_bytes.get(name, 0)) for name, size in self.memory_bytes.items()
        }

    def on(self, node: int) -> Group:
        """Return the GPUs of a node."""
        return tuple((node, gpu) for gpu in range(len(self.nodes[node])))

    def type_of(self, gpu: Gpu) -> str:
        """Return the type of a GPU."""
        return self.nodes[gpu[0]][gpu[1]]

    def kinds(self, group: Group) -> list[Group]:
        """Return the GPUs of a group by node and type; GPUs of the same kind are interchangeable."""
        found: dict[tuple[int, str], list[Gpu]] = {}
        for gpu in sorted(group):
            found.setdefault((gpu[0], self.type_of(gpu)), []).append(gpu)
        return [tuple(gpus) for gpus in found.values()]


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


def minibatches_held(stages_after: int, in_flight: int, *, is_first: bool = False) -> int:
    """Return the number of minibatches that a stage holds between their forward and backward passes.

    The last stage runs both passes as one and holds one minibatch, also where it is the only one. The first
    stage of several holds all that are in flight: a minibatch is in flight from its first forward to its
    last backward pass, and both are there (section 4). A stage between needs no more than two per following
    stage, and one, to be always busy: if each stage runs each pass once per period, a minibatch returns after
    at most two periods per following stage.
    """
    return in_flight if is_first and stages_after else min(in_flight, 2 * stages_after + 1)


def most_in_flight(gpus: int) -> int:
    """Return the minibatches that keep any pipeline of `gpus` GPUs busy; more only make waves longer."""
    return 2 * gpus - 1


def stage_bytes(profile: LayerProfile, held: int, *, recomputes: bool = False) -> NDArray[np.int64]:
    """Return the bytes of every stage, shape (layers, layers): first and last layer.

    For each minibatch held: its version of the weights (w_p in section 4), the data kept by its layers,
    and the activations received. Once: the accumulated updates of the wave, the gradients of the weights,
    which the optimizer applies before the next backward pass begins, the optimizer's state, and the
    workspace of the layer that needs most, as layers run one after another. The value is meaningless if the
    last layer comes before the first.

    Parameters
    ----------
    recomputes : bool
        True if the data of layers are kept for one minibatch, from a second forward to the backward pass.
    """
    received = np.concatenate([[0], profile.activation_bytes[:-1]])
    once = np.concatenate([[0], np.cumsum(_bytes_once(profile))])
    weights = np.concatenate([[0], np.cumsum(profile.parameter_bytes)])
    kept = np.concatenate([[0], np.cumsum(profile.kept_bytes)])
    counted = weights if recomputes else weights + kept
    of_each = counted[None, 1:] - (counted - np.append(received, 0))[:-1, None]
    if recomputes:
        once = once + kept
    workspace = np.maximum.accumulate(
        np.triu(np.broadcast_to(profile.workspace_bytes, of_each.shape)), axis=1
    )
    bytes_: NDArray[np.int64] = held * of_each + once[None, 1:] - once[:-1, None] + workspace
    return bytes_


def least_bytes(profile: LayerProfile) -> NDArray[np.int64]:
    """Return the bytes that each layer adds to any stage, shape (layers,): those of one minibatch held.

    Workspaces are left out, since the layers of a stage share one.
    """
    return profile.parameter_bytes + profile.kept_bytes + _bytes_once(profile)


def _bytes_once(profile: LayerProfile) -> NDArray[np.int64]:
    """Return the bytes of each layer that do not depend on the minibatches held, shape (layers,).

    The updates of a wave, the gradients of one minibatch, and the optimizer's state.
    """
    return 2 * profile.parameter_bytes + profile.slot_bytes


def bytes_alone(profile: LayerProfile) -> int:
    """Return the bytes that all layers need on one GPU, with one minibatch held."""
    return int(least_bytes(profile).sum() + profile.workspace_bytes.max())


class StageCosts:
    """Times of all stages of a network on the GPU types of a cluster.

    Parameters
    ----------
    recompute : bool
        True if stages may compute forward passes again when their memory cannot keep the data of all layers
        for the minibatches that they hold. The last stage holds none. Not in HetPipe.

    Attributes
    ----------
    receive_s : ndarray, shape (2, layers + 1)
        Seconds to receive the data that cross the cut before a layer, over a link between nodes (row 0) or
        within one (row 1); 0 before the first layer and after the last one.
    """

    def __init__(self, profile: LayerProfile, cluster: PipelineCluster, *, recompute: bool = True) -> None:
        self._recompute = recompute
        self.layers = len(profile.layers)
        self._profile = profile
        self._free_bytes = cluster.free_bytes
        sizes = profile.activation_bytes[:-1]
        self.receive_s = np.zeros((2, self.layers + 1))
        for same_node in (0, 1):
            seconds = [cluster.links.seconds(size, bool(same_node)) for size in sizes]
            self.receive_s[same_node, 1 : self.layers] = seconds
        self._compute: dict[str, NDArray[np.float64]] = {}
        self._with_held = cache(partial(stage_bytes, profile))
        self._bytes: dict[tuple[int, int, bool], NDArray[np.int64]] = {}
        self._fitting: dict[tuple[str, int, int], NDArray[np.float64]] = {}

    def compute_s(self, gpu_type: str, stages_after: int, in_flight: int) -> NDArray[np.float64]:
        """Return the seconds of all passes by first and last layer, shape (layers, layers).

        Infinite if the stage does not fit into the GPU's memory with the minibatches that it holds, or is
        empty.
        """
        key = (gpu_type, minibatches_held(stages_after, in_flight), in_flight)
        if key not in self._fitting:
            forward, backward = self._profile.forward_s(gpu_type), self._profile.backward_s(gpu_type)
            again = self.recomputes(gpu_type, stages_after, in_flight)
            seconds = _of_stages(forward + backward) + np.where(again, _of_stages(forward), 0.0)
            fits = self.least_bytes(stages_after, in_flight) <= self._free_bytes[gpu_type]
            self._fitting[key] = np.where(np.triu(fits), seconds, np.inf)
        return self._fitting[key]

    def recomputes(self, gpu_type: str, stages_after: int, in_flight: int) -> NDArray[np.bool_]:
        """Return true where a stage has to compute forward passes again, by first and last layer."""
        bytes_ = self.bytes(stages_after, in_flight)
        return (bytes_ > self._free_bytes[gpu_type]) & (self.least_bytes(stages_after, in_flight) < bytes_)

    def bytes(self, stages_after: int, in_flight: int, *, recomputes: bool = False) -> NDArray[np.int64]:
        """Return the bytes of a stage by first and last layer, shape (layers, layers).

        Parameters
        ----------
        stages_after : int
            Number of stages that follow; a stage with the first layer is the first of all.
        in_flight : int
            N_m: minibatches in the pipeline.
        recomputes : bool
            True if the stage computes forward passes again.
        """
        held = minibatches_held(stages_after, in_flight)
        if (held, in_flight, recomputes) not in self._bytes:
            found = self._with_held(held, recomputes=recomputes).copy()
            of_first = minibatches_held(stages_after, in_flight, is_first=True)
            found[0] = self._with_held(of_first, recomputes=recomputes)[0]
            self._bytes[held, in_flight, recomputes] = found
        return self._bytes[held, in_flight, recomputes]

    def least_bytes(self, stages_after: int, in_flight: int) -> NDArray[np.int64]:
        """Return the bytes of a stage that computes forward passes again, if that is possible."""
        return self.bytes(stages_after, in_flight, recomputes=self._recompute and stages_after > 0)


def _of_stages(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums over the layers of each stage by first and last layer, shape (layers, layers)."""
    until = np.concatenate([[0.0], np.cumsum(seconds)])
    sums: NDArray[np.float64] = until[None, 1:] - until[:-1, None]
    return sums
