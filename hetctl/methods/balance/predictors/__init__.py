"""Predictors of each worker's speed in the next iteration (LB-BSP, section 3.2.2), one module per kind."""

from __future__ import annotations

from collections.abc import Callable

from hetctl.methods.balance.predictors import lstm, narx, rnn
from hetctl.methods.balance.predictors.arima import Arima
from hetctl.methods.balance.predictors.averages import Ema, Memoryless
from hetctl.methods.balance.predictors.base import Predictor

PREDICTORS: dict[str, Callable[[int, int], Predictor]] = {
    "memoryless": lambda workers, _: Memoryless(workers),
    "ema": lambda workers, _: Ema(workers),
    "arima": lambda workers, _: Arima(workers),
    "rnn": rnn.rnn,
    "lstm": lstm.lstm,
    "narx": narx.narx,
}
"""Constructors of predictors by name, with the number of workers and a seed as arguments."""
