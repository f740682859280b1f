"""Batches in proportion to speeds (LB-BSP, Algorithm 1): a manager, and the first batches of members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hetctl.methods.balance.batch_partition import Lines, Values, whole_batches
from hetctl.methods.balance.manager import Observation, StragglerWarning, checked_limits
from hetctl.methods.balance.predictors.base import Predictor
from hetctl.model.plan import Allocation
from hetctl.model.workload import Workload


class CpuManager:
    """Manager for workers without accelerators: Gamma_i(x) = x / v_i, with the predicted v_i.

    Parameters
    ----------
    batches : sequence of int
        Batches of the first iteration; their sum is kept.
    predictor : Predictor
        Predictor for the same number of workers, F_i in the paper.
    caps : sequence of int or None
        Largest batch of each worker, None for no cap; empty if no worker has one.

    Raises
    ------
    BadInputError, InfeasibleError
        If batches and caps are inconsistent.
    """

    def __init__(self, batches: Sequence[int], predictor: Predictor, caps: Sequence[int | None] = ()) -> None:
        self._limits = checked_limits(batches, caps)
        self._predictor = predictor
        self.batches = tuple(batches)
        self.warnings: tuple[StragglerWarning, ...] = ()

    def update(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Return batches for the predicted speeds (Algorithm 1).

        They are rounded such that the slowest worker is fastest.
        """
        self._predictor.observe(
            np.array([seen.batch / seen.seconds for seen in observations]),
            np.array([seen.cpu for seen in observations]),
            np.array([seen.memory for seen in observations]),
        )
        speeds = self._predictor.predict()
        self.batches = _in_proportion(speeds, sum(self.batches), self._limits)
        return self.batches


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
    batches = _in_proportion(rates, given.gpus * batch_size, np.full_like(rates, np.inf))
    return replace(given, batch_sizes=batches)


def _in_proportion(speeds: Values, total: int, limits: Values) -> tuple[int, ...]:
    """Return integer batches with sum `total` and the least longest time x_i / v_i (lines 7 to 9)."""
    lines = Lines(np.zeros_like(speeds), 1 / speeds)
    # Plain rounding of the fractions could give the slowest worker a sample that delays all.
    return tuple(whole_batches(lines, total, limits).tolist())
