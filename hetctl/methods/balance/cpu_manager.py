"""Batches in proportion to speeds (LB-BSP, Algorithm 1): a manager, and the first batches of members."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hetctl.methods.balance.batch_partition import Lines, Values, whole_batches
from hetctl.methods.balance.manager import FULL_MEMORY, Observation, StragglerWarning, checked_limits
from hetctl.methods.balance.predictors.base import Predictor
from hetctl.methods.balance.predictors.learner import Learner
from hetctl.model.plan import Allocation


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

    @property
    def learner(self) -> Learner | None:
        """The predictor, if it has networks."""
        return self._predictor if isinstance(self._predictor, Learner) else None

    def update(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Return batches for the predicted speeds (Algorithm 1).

        They are rounded such that the slowest worker is fastest. A worker without free memory gets no larger
        one, as by the other managers; Algorithm 1 has no such rule.
        """
        self._predictor.observe(
            np.array([seen.batch / seen.seconds for seen in observations]),
            np.array([seen.cpu for seen in observations]),
            np.array([seen.memory for seen in observations]),
        )
        speeds = self._predictor.predict()
        full = np.array([seen.memory > FULL_MEMORY for seen in observations])
        # At least the present batches, so that their sum fits.
        limits = np.where(full, np.minimum(self._limits, self.batches), self._limits)
        self.batches = _in_proportion(speeds, sum(self.batches), limits)
        return self.batches


def first_batches(
    given: Allocation, samples: int, gpu_types: Mapping[str, str], rate_of: Callable[[str], float]
) -> tuple[int, ...]:
    """Return a batch for each GPU of an allocation in proportion to its rate (LB-BSP, Algorithm 1).

    Empty if the GPUs are of one type. During training, a manager adapts the batches.

    Parameters
    ----------
    samples : int
        Samples of a step of the whole group, the sum of the batches.
    gpu_types : mapping of str to str
        GPU type of each node.
    rate_of : callable
        Function that returns the member's rate on as many GPUs of one type, in samples/s.
    """
    types = [gpu_types[part.node] for part in given.placement for _ in part.gpus]
    if len(set(types)) == 1:
        return ()
    rates = np.array([rate_of(gpu_type) for gpu_type in types])
    return _in_proportion(rates, samples, np.full_like(rates, np.inf))


def _in_proportion(speeds: Values, total: int, limits: Values) -> tuple[int, ...]:
    """Return integer batches with sum `total` and the least longest time x_i / v_i (lines 7 to 9)."""
    lines = Lines(np.zeros_like(speeds), 1 / speeds)
    # Plain rounding of the fractions could give the slowest worker a sample that delays all.
    return tuple(whole_batches(lines, total, limits).tolist())
