"""Transfer time of activations and gradients between GPUs (HetPipe, section 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetctl.model.site import Point


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
    # Noise of measurements may tilt the line; a negative bandwidth or latency would be exploited by a plan.
    if slope < 0:
        return float(seconds.mean()), 0.0
    if latency < 0:
        return 0.0, float(sizes @ seconds / (sizes @ sizes))
    return latency, slope
