"""Predictors of each worker's speed in the next iteration (LB-BSP, section 3.2.2), one module per kind."""

from __future__ import annotations

from collections.abc import Callable

from hetctl.methods.balance.predictors.base import Memoryless, Predictor
from hetctl.methods.balance.predictors.learner import narx

PREDICTORS: dict[str, Callable[[int, int], Predictor]] = {
    "memoryless": lambda workers, _: Memoryless(workers),
    "narx": narx,
}
"""Constructors of predictors by name, with the number of workers and a seed as arguments."""
