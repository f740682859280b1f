"""Settings of balanced batches (LB-BSP) of a run."""

from __future__ import annotations

from dataclasses import dataclass

AUTO, ON, OFF = "auto", "on", "off"
BALANCE_MODES = (AUTO, ON, OFF)
MANAGERS = ("cpu", "gpu", "curve")
"""Managers of batch sizes: Algorithm 1 and Algorithm 2 of LB-BSP, and time curves learnt online."""
PREDICTORS = ("memoryless", "ema", "arima", "rnn", "lstm", "narx")
"""Predictors of speeds, for the manager ``cpu``."""


@dataclass(frozen=True)
class BalanceSettings:
    """Choice whether and how the ranks of a group get batches that fit their speeds.

    Parameters
    ----------
    mode : str
        ``on``: from the first step. ``off``: never. ``auto``: from the first step for a group on several
        types of GPU; for any other group as soon as its ranks drift apart.
    manager : str
        One of `MANAGERS`.
    predictor : str
        One of `PREDICTORS`; used by the manager ``cpu`` alone.
    """

    mode: str = AUTO
    manager: str = "curve"
    predictor: str = "narx"
