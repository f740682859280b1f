"""Execution time and memory of every possible stage (HetPipe, sections 4 and 7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.layers import LayerProfile


def minibatches_held(stages_after: int, in_flight: int, *, is_first: bool = False) -> int:
    """Return the number of minibatches that a stage holds between their forward and backward passes.

    The last stage runs both passes as one and holds one minibatch, also where it is the only one. The first
    stage of several holds all that are in flight: a minibatch is in flight from its first forward to its
    last backward pass, and both are there (section 4). In a pipeline in which each stage runs each pass once
    per period, a minibatch takes at most two periods per following stage to return, so a stage between holds
    no more to be always busy.
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
        The data of layers are kept for one minibatch, from a second forward pass to the backward pass.
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
        Stages without memory for the data of all layers of the minibatches that they hold may compute their
        forward passes again. The last stage holds none. Not in HetPipe.

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
        self._of_held: dict[tuple[int, bool], NDArray[np.int64]] = {}
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
        """Return whether a stage computes forward passes again, by first and last layer: only if it must."""
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
            The stage computes forward passes again.
        """
        held = minibatches_held(stages_after, in_flight)
        if (held, in_flight, recomputes) not in self._bytes:
            found = self._with_held(held, recomputes).copy()
            of_first = minibatches_held(stages_after, in_flight, is_first=True)
            found[0] = self._with_held(of_first, recomputes)[0]
            self._bytes[held, in_flight, recomputes] = found
        return self._bytes[held, in_flight, recomputes]

    def least_bytes(self, stages_after: int, in_flight: int) -> NDArray[np.int64]:
        """Return the bytes of a stage that computes forward passes again, if that is possible."""
        return self.bytes(stages_after, in_flight, recomputes=self._recompute and stages_after > 0)

    def _with_held(self, held: int, recomputes: bool) -> NDArray[np.int64]:
        if (held, recomputes) not in self._of_held:
            self._of_held[held, recomputes] = stage_bytes(self._profile, held, recomputes=recomputes)
        return self._of_held[held, recomputes]


def _of_stages(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums over the layers of each stage by first and last layer, shape (layers, layers)."""
    until = np.concatenate([[0.0], np.cumsum(seconds)])
    sums: NDArray[np.float64] = until[None, 1:] - until[:-1, None]
    return sums
