"""Members that share a GPU: what each takes of it, and how much slower than alone they train together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hetctl.model.site import MOST_PER_GPU, Site
from hetctl.model.training_progress import FusedRates
from hetctl.model.values import dataclass
from hetctl.model.workload import Slowed

FULL = 1.25
"""Sum of busy shares from which on a GPU has no time left for another member.

It is above 1: members that wait for each other's kernels at times leave the device idle at others.
"""
LEAST_BUSY = 0.01
"""Least busy share that counts: counters of use are no more exact."""
RESERVE = 0.1
"""Share of a GPU's memory that stays free, for peaks that were not measured."""
CONTEXT_BYTES = 600 * 2**20
"""Memory of a process on a GPU that frameworks do not count: the context and the libraries' kernels."""
CONTEXTS = 0.25
"""Share of a GPU's memory that the contexts may take where hetctl chooses how many members share it."""


@dataclass(frozen=True)
class GpuTerms:
    """Rules by which members share a GPU.

    Parameters
    ----------
    most : int
        Largest number of members on a GPU; 1: they share none.
    memory_bytes : int or None
        Memory of a GPU, or of the node for each slot; None: unknown.
    context_bytes : int
        Memory of a process beyond its measured peak, also of one that waits for its next member.
    """

    most: int = 1
    memory_bytes: int | None = None
    context_bytes: int = 0

    @classmethod
    def at(cls, site: Site, most: int) -> GpuTerms:
        """Return the terms at a site."""
        if site.device == "gpu":
            return cls(most, site.gpu_memory, CONTEXT_BYTES)
        return cls(most, site.memory_per_gpu)

    @classmethod
    def most_at(cls, site: Site) -> int:
        """Return the largest number of members on a GPU that its memory permits; 1 if that is unknown.

        Slots are parts of a node that the user chose, and a process that computes keeps its cores busy.
        """
        if site.device != "gpu" or not site.gpu_memory:
            return 1
        return min(max(int(CONTEXTS * site.gpu_memory) // CONTEXT_BYTES, 1), MOST_PER_GPU)

    def busy_of(self, measured: float | None) -> float:
        """Return the busy share of a member that counts: 1, as of one that shares nothing, if unknown."""
        return 1.0 if measured is None or self.most == 1 else max(measured, LEAST_BUSY)

    def memory_of(self, peak_bytes: int) -> float:
        """Return the share of a GPU's memory that a member takes, at least an equal part of it."""
        if not self.memory_bytes:
            return 1 / self.most
        usable = (1 - RESERVE) * self.memory_bytes - self.most * self.context_bytes
        return max(peak_bytes / max(usable, 1.0), 1 / self.most)


NO_SHARING = GpuTerms()
LEAST_GAIN = 1.05
"""Rate of fused members over that of members alone, below which they train alone."""
DOUBT = 2
"""Number of shapes beside which a member was seen that count as much as the busy shares do."""
NOISE, UNLIKE = 0.1, 0.3
"""Standard deviations of logarithms: of rates seen beside others, and of slowdowns of pairs of shapes."""


def may_gain(rates: FusedRates) -> bool:
    """Return true unless fused members gain nothing on any type of GPU on which that was measured."""
    alone = {gpu_type: rate for gpu_type, members, rate in rates if members == 1}
    return not alone or any(rate > LEAST_GAIN * alone.get(of, math.inf) for of, _, rate in rates)


def slowed_by(logs: Sequence[float], prior: float = NOISE**2 / UNLIKE**2) -> Slowed:
    """Return the slowdown that observations tell of, if logarithms have a normal distribution about 0.

    Parameters
    ----------
    logs : sequence of float
        Logarithms of the rates by the busy shares over those that were seen.
    prior : float
        Number of observations that count as much as the busy shares do.
    """
    weight = len(logs) + prior
    mean = math.fsum(logs) / weight
    variance = math.fsum((one - mean) ** 2 for one in logs) / weight
    return Slowed(max(1.0, math.exp(mean)), math.sqrt(max(variance, NOISE**2) / weight))


def slowdown(busy: Iterable[float]) -> float:
    """Return the factor by which each of several members on one GPU is slower than alone.

    Kernels take turns, so each trains as fast as alone while the busy shares add up to no more than 1, and
    beyond that the device is always busy and divided in proportion.
    """
    return max(1.0, sum(busy))
