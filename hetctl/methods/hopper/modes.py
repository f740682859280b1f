"""Training modes: the hopper, data parallelism and their hybrid (CEREBRO, appendix 12, Horovod hopper)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.hopper.schedule import Schedule
from hetctl.methods.hopper.unit_times import UnitTimes
from hetctl.model.plan import DATA_PARALLEL, HOPPER
from hetctl.model.values import dataclass

HYBRID = "hybrid"

Efficiency = Callable[[int], float]
"""Share of the ideal rate by size of a group: rate / (size * rate of one)."""
Groups = tuple[tuple[int, ...], ...]
"""Numbers of the workers in each group."""


def modes(configs: int, workers: int) -> tuple[str, ...]:
    """Return the training modes by the rule of appendix 12: the hopper if p/2 < ``|S|``.

    Otherwise the paper uses data parallelism. The hybrid, which lies between the two, comes second, for
    callers that compare the cost of both.
    """
    return (HOPPER,) if workers / 2 < configs else (DATA_PARALLEL, HYBRID)


def hopper_epochs(epochs: Sequence[int], gpus: int) -> int:
    """Return the number of epochs that have enough configurations for hopping (CEREBRO, appendix 12).

    Parameters
    ----------
    epochs : sequence of int
        Epochs that each configuration has left. Configurations that are done leave, until too few remain.
    gpus : int
        Number of workers, p in the paper.
    """
    left = sorted(epochs, reverse=True)
    return next((left[n - 1] for n in range(1, len(left) + 1) if modes(n, gpus)[0] == HOPPER), 0)


def groups(mode: str, units: UnitTimes) -> Groups:
    """Return the groups of workers: all workers in one, or in the hybrid one group per configuration.

    The hybrid's groups have equal sizes or differ by one worker. Since a group is as slow as its slowest
    worker, workers of similar speed are grouped. In the hopper each worker is a group.
    """
    if mode == HOPPER:
        return tuple((worker,) for worker in range(len(units.workers)))
    busy_s = _by_worker(units).sum(axis=0)
    workers = sorted(range(len(units.workers)), key=lambda worker: float(busy_s[worker]))
    count = min(len(units.configs), len(workers)) if mode == HYBRID else 1
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


@dataclass(frozen=True)
class ModeCost:
    """Schedule of one training mode; its groups of workers act as the hopper's workers.

    Parameters
    ----------
    groups : Groups
        Numbers of the workers in each group.
    units : UnitTimes
        Unit times of the groups.
    schedule : Schedule
        Schedule of one epoch.
    """

    mode: str
    groups: Groups
    units: UnitTimes
    schedule: Schedule


def estimated_costs(
    units: UnitTimes,
    modes: Iterable[str],
    efficiency: Efficiency,
    schedule: Callable[[UnitTimes], Schedule],
) -> list[ModeCost]:
    """Return the modes from the fastest to the slowest; equally fast ones stay in the given order.

    Parameters
    ----------
    efficiency : callable
        Efficiency of a group that trains data-parallel, by its size.
    schedule : callable
        Scheduler of the hopper, with its options.

    Raises
    ------
    BadInputError
        If partitions are on several workers or a worker has several, and a mode groups workers.
    """
    costs = []
    for mode in modes:
        parts = groups(mode, units)
        times = units if mode == HOPPER else grouped(units, parts, efficiency)
        costs.append(ModeCost(mode, parts, times, schedule(times)))
    # The sort is stable: at equal costs the mode that the paper's rule prefers stays first.
    return sorted(costs, key=lambda one: one.schedule.makespan_s)
