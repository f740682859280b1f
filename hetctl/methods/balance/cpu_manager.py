"""Batches in proportion to predicted speeds, for workers without accelerators (LB-BSP, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetctl.methods.balance.batch_partition import Lines, whole_batches
from hetctl.methods.balance.manager import Observation, StragglerWarning, checked_limits
from hetctl.methods.balance.predictors.base import Predictor


class CpuManager:
    """Manager of Algorithm 1: Gamma_i(x) = x / v_i, with the predicted v_i of the next iteration.

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
        """Return batches for the predicted speeds, rounded such that the slowest worker is fastest."""
        self._predictor.observe(
            np.array([seen.batch / seen.seconds for seen in observations]),
            np.array([seen.cpu for seen in observations]),
            np.array([seen.memory for seen in observations]),
        )
        speeds = self._predictor.predict()
        lines = Lines(np.zeros_like(speeds), 1 / speeds)
        self.batches = tuple(whole_batches(lines, sum(self.batches), self._limits).tolist())
        return self.batches
