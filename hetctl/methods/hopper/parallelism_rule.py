"""Choice between hopping and groups for few configurations (CEREBRO, appendix 12, Horovod hopper)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.hopper.unit_times import UnitTimes
from hetctl.model.plan import DATA_PARALLEL, HOPPER

HYBRID = "hybrid"
WAYS = (HOPPER, HYBRID, DATA_PARALLEL)

Efficiency = Callable[[int], float]
"""Share of the ideal rate by size of a group: rate / (size * rate of one)."""
Groups = tuple[tuple[int, ...], ...]
"""Numbers of the workers in each group."""


def ways(configs: int, workers: int) -> tuple[str, ...]:
    """Return the training modes by the rule of appendix 12: the hopper if p/2 < ``|S|``.

    Otherwise the paper uses data parallelism. The hybrid, which lies between the two, comes second, for
    callers that compare the cost of both.
    """
    return (HOPPER,) if workers / 2 < configs else (DATA_PARALLEL, HYBRID)


def groups(way: str, units: UnitTimes) -> Groups:
    """Return the groups of workers: all workers in one, or in the hybrid one group per configuration.

    The hybrid's groups have equal sizes or differ by one worker. Since a group is as slow as its slowest
    worker, workers of similar speed are grouped. In the hopper each worker is a group.
    """
    if way == HOPPER:
        return tuple((worker,) for worker in range(len(units.workers)))
    busy_s = _by_worker(units).sum(axis=0)
    workers = sorted(range(len(units.workers)), key=lambda worker: float(busy_s[worker]))
    count = min(len(units.configs), len(workers)) if way == HYBRID else 1
    return tuple(tuple(int(worker) for worker in part) for part in np.array_split(workers, count))


def grouped(units: UnitTimes, parts: Groups, efficiency: Efficiency) -> UnitTimes:
    """Return the unit times of groups, between which configurations hop.

    Every worker of a group processes its own partition in step with the others, so the sub-epoch takes as
    long as that of the slowest worker, divided by the efficiency of the group.

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
    """Return the unit times in seconds, shape (configs, workers), each worker on its own partition."""
    return units.matrix[:, np.argsort(units.homes)]
