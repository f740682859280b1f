"""Members that share a GPU: what each takes of it, and how much slower than alone they train together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hetctl.model.site import Site
from hetctl.model.values import dataclass

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
"""Number of rates seen together that count as much as the busy shares do."""


def slowed_by(planned_and_seen: Sequence[tuple[float, float]]) -> float:
    """Return the factor by which members of a shape are slower beside others than the busy shares say.

    Parameters
    ----------
    planned_and_seen : sequence of (float, float)
        Their rates on shared GPUs by the busy shares, and as they were seen, in samples/s.
    """
    logs = [math.log(planned / seen) for planned, seen in planned_and_seen]
    return max(1.0, math.exp(math.fsum(logs) / (len(logs) + DOUBT)))


def slowdown(busy: Iterable[float]) -> float:
    """Return the factor by which each of several members on one GPU is slower than alone.

    Kernels take turns, so each trains as fast as alone while the busy shares add up to no more than 1, and
    beyond that the device is always busy and divided in proportion.
    """
    return max(1.0, sum(busy))
