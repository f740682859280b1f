"""Optimal sharing of units among the workers that have their partitions: a linear programme."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def shares(seconds: NDArray[np.float64], one_at_a_time: bool) -> tuple[float, NDArray[np.float64]]:
    """Return the least makespan, and the share of each unit that each worker processes in it.

    With preemption it is sufficient that no worker is busy for longer than the makespan, and, if a
    configuration can be on only one worker at a time, no configuration either (Lawler and Labetoulle, 1978).

    Parameters
    ----------
    seconds : array of shape (configs, partitions, workers)
        Unit times; infinite if the worker does not have the partition.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    configs, partitions, workers = seconds.shape
    places = np.nonzero(np.isfinite(seconds))
    config, partition, worker = places
    count = len(config)
    columns, limits = np.arange(count), np.arange(workers + configs * one_at_a_time)
    busy = [worker, workers + config] if one_at_a_time else [worker]
    rows = np.concatenate([*busy, limits])
    columns_of_rows = np.concatenate([columns] * len(busy) + [np.full(len(limits), count)])
    terms = np.concatenate([seconds[places]] * len(busy) + [-np.ones(len(limits))])
    units = (config * partitions + partition, columns)
    solution = linprog(
        c=np.append(np.zeros(count), 1.0),
        A_eq=coo_array((np.ones(count), units), shape=(configs * partitions, count + 1)),
        b_eq=np.ones(configs * partitions),
        A_ub=coo_array((terms, (rows, columns_of_rows)), shape=(len(limits), count + 1)),
        b_ub=np.zeros(len(limits)),
        method="highs-ipm",
    )
    found = np.zeros(seconds.shape)
    found[places] = solution.x[:count]
    return float(solution.fun), found
