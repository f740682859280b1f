"""The residual problem: what is left of a run at some time, to be scheduled anew."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.hopper.unit_times import UnitTimes

Release = tuple[float, int, int]
"""End of what is running, in seconds from now; its worker and its configuration."""


@dataclass(frozen=True, eq=False)
class Residual:
    """Units that are neither done nor running, and who is free for them when.

    Parameters
    ----------
    waiting : array of bool of shape (configs, partitions)
        Units of the epochs that configurations are in.
    epochs : array of int of shape (configs,)
        Whole epochs that follow.
    running : tuple of Release
        Nothing is preempted.
    absent : frozenset of int
        Workers that are away, nobody knows for how long.
    """

    units: UnitTimes
    waiting: NDArray[np.bool_]
    epochs: NDArray[np.intp]
    running: tuple[Release, ...] = ()
    absent: frozenset[int] = frozenset()

    @classmethod
    def whole(cls, units: UnitTimes) -> Residual:
        """Return an epoch that has not begun, on workers that are all there."""
        configs, partitions, _ = units.seconds.shape
        return cls(units, np.ones((configs, partitions), dtype=bool), np.zeros(configs, dtype=np.intp))
