"""Initial batches of members that train on several types of GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hetctl.methods.balance.batch_partition import Lines, whole_batches
from hetctl.model.plan import Allocation
from hetctl.model.workload import Workload


def with_batches(
    given: Allocation, workload: Workload, batch_size: int, gpu_types: Mapping[str, str]
) -> Allocation:
    """Return the allocation with a batch for each of its GPUs if they are of several types.

    The sum of the batches is that of equal ones of `batch_size`. They are in proportion to each GPU's rate
    (LB-BSP, Algorithm 1). During training, a manager of `hetctl.methods.balance` adapts them.

    Parameters
    ----------
    gpu_types : mapping of str to str
        GPU type of each node.
    """
    types = [gpu_types[part.node] for part in given.placement for _ in part.gpus]
    if len(set(types)) == 1:
        return given
    rates = np.array([workload.on_type(gpu_type).rates[given.gpus] for gpu_type in types])
    lines = Lines(np.zeros_like(rates), 1 / rates)
    batches = whole_batches(lines, given.gpus * batch_size, np.full_like(rates, np.inf))
    return replace(given, batch_sizes=tuple(batches.tolist()))
