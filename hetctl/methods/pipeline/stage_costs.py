"""Execution time of every possible stage, the cost of a partition (HetPipe, section 4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.stage_memory import stage_bytes


class StageCosts:
    """Times of all stages of a network on the GPU types of a cluster.

    Attributes
    ----------
    receive_s : ndarray, shape (2, layers + 1)
        Seconds to receive the data that cross the cut before a layer, over a link between nodes (row 0) or
        within one (row 1); 0 before the first layer and after the last one.
    """

    def __init__(self, profile: LayerProfile, cluster: PipelineCluster) -> None:
        self.layers = len(profile.layers)
        self._profile = profile
        self._memory_bytes = cluster.memory_bytes
        sizes = profile.activation_bytes[:-1]
        self.receive_s = np.zeros((2, self.layers + 1))
        for same_node in (0, 1):
            seconds = [cluster.links.seconds(size, bool(same_node)) for size in sizes]
            self.receive_s[same_node, 1 : self.layers] = seconds
        self._compute: dict[str, NDArray[np.float64]] = {}
        self._bytes: dict[int, NDArray[np.int64]] = {}
        self._fitting: dict[tuple[str, int], NDArray[np.float64]] = {}

    def compute_s(self, gpu_type: str, held: int) -> NDArray[np.float64]:
        """Return the seconds of both passes by first and last layer, shape (layers, layers).

        Infinite if the stage does not fit into the GPU's memory with `held` minibatches, or is empty.
        """
        key = (gpu_type, held)
        if key not in self._fitting:
            fits = self.bytes(held) <= self._memory_bytes[gpu_type]
            self._fitting[key] = np.where(np.triu(fits), self._all_compute_s(gpu_type), np.inf)
        return self._fitting[key]

    def bytes(self, held: int) -> NDArray[np.int64]:
        """Return the bytes of a stage by first and last layer, shape (layers, layers)."""
        if held not in self._bytes:
            self._bytes[held] = stage_bytes(self._profile, held)
        return self._bytes[held]

    def _all_compute_s(self, gpu_type: str) -> NDArray[np.float64]:
        if gpu_type not in self._compute:
            both = self._profile.forward_s(gpu_type) + self._profile.backward_s(gpu_type)
            until = np.concatenate([[0.0], np.cumsum(both)])
            self._compute[gpu_type] = until[None, 1:] - until[:-1, None]
        return self._compute[gpu_type]
