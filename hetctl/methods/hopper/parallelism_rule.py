"""With few configurations: whether workers train together (CEREBRO, appendix 12, Horovod hopper)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.hopper.unit_times import UnitTimes
from hetctl.model.plan import DATA_PARALLEL, HOPPER

HYBRID = "hybrid"
WAYS = (HOPPER, HYBRID, DATA_PARALLEL)

Efficiency = Callable[[int], float]
"""From the size of a group to the share of the ideal rate that it reaches: rate / (size * rate of one)."""
Groups = tuple[tuple[int, ...], ...]
"""The workers of each group, by their numbers."""


def ways(configs: int, workers: int) -> tuple[str, ...]:
    """Return how to train by the rule of appendix 12: the hopper while p/2 < ``|S|``.

    Below that the paper takes data parallelism. The hybrid, which lies between the two, comes second:
    it is for whoever can price both.
    """
    return (HOPPER,) if workers / 2 < configs else (DATA_PARALLEL, HYBRID)


def groups(way: str, units: UnitTimes) -> Groups:
    """Return who trains together: all, or in the hybrid as many groups as there are configurations.

    The hybrid's groups are of equal size or differ by one worker. Since a group is as slow as its
    slowest worker, workers of about the same speed go together.
    """
    if way == HOPPER:
        return tuple((worker,) for worker in range(len(units.workers)))
    busy_s = _by_worker(units).sum(axis=0)
    workers = sorted(range(len(units.workers)), key=lambda worker: float(busy_s[worker]))
    count = min(len(units.configs), len(workers)) if way == HYBRID else 1
    return tuple(tuple(int(worker) for worker in part) for part in np.array_split(workers, count))


def grouped(units: UnitTimes, parts: Groups, efficiency: Efficiency) -> UnitTimes:
    """Return the unit times of groups: a configuration hops from group to group.

    Every worker of a group goes through its own partition in step with the others, so the sub-epoch
    takes as long as the slowest one's, and longer by what the group is short of the ideal.

    Raises
    ------
    BadInputError
        If partitions are on several workers, or a worker has several.
    """
    matrix = _by_worker(units)
    columns = [matrix[:, list(part)].max(axis=1) / efficiency(len(part)) for part in parts]
    names = ["+".join(units.workers[worker] for worker in part) for part in parts]
    return UnitTimes.from_matrix(np.stack(columns, axis=1), units.configs, names)


def _by_worker(units: UnitTimes) -> NDArray[np.float64]:
    """Return the seconds of shape (configs, workers), each worker on its own partition."""
    return units.matrix[:, np.argsort(units.homes)]
