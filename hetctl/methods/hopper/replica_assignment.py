"""Assignment of units to workers for partitions with replicas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetctl.methods.hopper.lp_bound import shares
from hetctl.methods.hopper.unit_times import UnitTimes


def settled(units: UnitTimes, seed: int) -> UnitTimes:
    """Return the units with one worker each, such that all workers are about equally busy.

    A partition is shared as if all configurations were one; the configurations of a worker are then drawn.
    If some partition has no worker that can train them all, the units are returned unchanged.
    """
    together = units.seconds.sum(axis=0)
    if np.isinf(together).all(axis=1).any():
        return units
    _, (parts,) = shares(together[None], one_at_a_time=False)
    draw = np.random.default_rng(seed)
    seconds = np.full_like(units.seconds, np.inf)
    for partition, part in enumerate(parts):
        configs = draw.permutation(len(units.configs))
        times = units.fastest[configs, partition]
        done = (np.cumsum(times) - times / 2) / max(times.sum(), np.finfo(float).tiny)
        last = part.nonzero()[0].max()
        workers = np.searchsorted(np.cumsum(part), done, side="right").clip(max=last)
        seconds[configs, partition, workers] = units.seconds[configs, partition, workers]
    return replace(units, seconds=seconds)
