"""Predictors of LB-BSP's Table 3: hetctl's own, and those that the paper compares them with (section 5.4)."""

from __future__ import annotations

from collections.abc import Callable

from replays.arima import Arima
from replays.lstm import lstm
from replays.rnn import rnn

from hetctl.methods.balance.predictors.learner import PREDICTORS as OWN
from hetctl.methods.balance.predictors.learner import Ema, Predictor

PREDICTORS: dict[str, Callable[[int, int], Predictor]] = {
    "memoryless": OWN["memoryless"],
    "ema": lambda workers, _: Ema(workers),
    "arima": lambda workers, _: Arima(workers),
    "rnn": rnn,
    "lstm": lstm,
    "narx": OWN["narx"],
}
"""Constructors by name, in the order of the table."""
