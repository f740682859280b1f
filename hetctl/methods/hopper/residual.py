"""Residual problem: the part of a run that is left to schedule at some time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.hopper.unit_times import UnitTimes

Release = tuple[float, int, int]
"""End of a running unit in seconds from now, its worker and its configuration."""


@dataclass(frozen=True, eq=False)
class Residual:
    """Units that are neither done nor running, and the times at which workers become free.

    Parameters
    ----------
    waiting : array of bool of shape (configs, partitions)
        Waiting units of the configurations' present epochs.
    epochs : array of int of shape (configs,)
        Whole epochs that follow.
    running : tuple of Release
        Running units, which are not preempted.
    absent : frozenset of int
        Workers that are absent for an unknown time.
    """

    units: UnitTimes
    waiting: NDArray[np.bool_]
    epochs: NDArray[np.intp]
    running: tuple[Release, ...] = ()
    absent: frozenset[int] = frozenset()

    @classmethod
    def whole(cls, units: UnitTimes) -> Residual:
        """Return the residual problem of an epoch that has not begun, with all workers present."""
        configs, partitions, _ = units.seconds.shape
        return cls(units, np.ones((configs, partitions), dtype=bool), np.zeros(configs, dtype=np.intp))
