"""Dense schedules by the longest remaining time, as starting points of a search."""

from __future__ import annotations

import numpy as np

from hetctl.methods.hopper.list_schedule import Numbers, Rule, dispatch_residual
from hetctl.methods.hopper.residual import Residual
from hetctl.methods.hopper.schedule import Schedule
from hetctl.methods.hopper.unit_times import UnitTimes

NOISES = (0.1, 0.02, 0.2, 0.05, 0.4)
"""Noise levels to try in turn, as shares of the longest configuration's time."""


def dense(units: UnitTimes, noise: float = 0.0, seed: int = 0) -> Schedule:
    """Return the dense schedule in which a worker begins the unit with the most remaining time.

    The remaining time is that of its configuration plus that of its partition.

    Parameters
    ----------
    noise : float
        Upper limit of the random time added to the remaining time, as a share of the longest
        configuration's time.
    """
    return dense_residual(Residual.whole(units), noise, seed)


def dense_residual(residual: Residual, noise: float = 0.0, seed: int = 0) -> Schedule:
    """Return a dense schedule, as `dense`, of what is left; future epochs count as remaining time."""
    return dispatch_residual(residual, _longest_left(residual, noise, np.random.default_rng(seed)))


def _longest_left(residual: Residual, noise: float, draw: np.random.Generator) -> Rule:
    seconds = residual.units.fastest
    left_s = seconds * (residual.waiting + residual.epochs[:, None])
    configs_s, partitions_s = left_s.sum(axis=1), left_s.sum(axis=0)
    spread_s = noise * configs_s.max()
    count = seconds.shape[1]

    def rule(_worker: int, ready: Numbers) -> int:
        configs, partitions = np.divmod(ready, count)
        left_s = configs_s[configs] + partitions_s[partitions] + spread_s * draw.random(len(ready))
        at = left_s.argmax()
        config, partition = configs[at], partitions[at]
        configs_s[config] -= seconds[config, partition]
        partitions_s[partition] -= seconds[config, partition]
        return int(ready[at])

    return rule
