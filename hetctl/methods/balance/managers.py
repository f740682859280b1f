"""Choice of the manager of batch sizes by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hetctl.methods.balance.cpu_manager import CpuManager
from hetctl.methods.balance.curve_manager import CurveManager
from hetctl.methods.balance.gpu_manager import GpuManager
from hetctl.methods.balance.manager import BatchSizeManager
from hetctl.methods.balance.predictors import PREDICTORS
from hetctl.model.training_settings import BalanceSettings

Caps = Sequence[int | None]
_MANAGERS: Mapping[str, Callable[[Sequence[int], Caps, str, int], BatchSizeManager]] = {
    "cpu": lambda batches, caps, predictor, seed: CpuManager(
        batches, PREDICTORS[predictor](len(batches), seed), caps
    ),
    "gpu": lambda batches, caps, *_: GpuManager(batches, caps),
    "curve": lambda batches, caps, *_: CurveManager(batches, caps),
}


def manager_of(
    settings: BalanceSettings, batches: Sequence[int], caps: Caps = (), seed: int = 0
) -> BatchSizeManager:
    """Return a new manager; its `state_of` is sufficient to continue elsewhere.

    Parameters
    ----------
    batches : sequence of int
        Batches of the first iteration; their sum is kept.
    caps : sequence of int or None
        Largest batch of each worker, None for no cap; empty if no worker has one.
    seed : int
        Seed of the predictor.

    Raises
    ------
    BadInputError, InfeasibleError
        If batches and caps are inconsistent.
    """
    return _MANAGERS[settings.manager](batches, caps, settings.predictor, seed)
