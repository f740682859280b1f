"""Loss and duration of the epochs of a paced trial, the same for all who search."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

UNIT_S = 0.4
"""Seconds of an epoch of width 1."""


def loss_after(config: Mapping[str, float], epochs: int) -> float:
    """Return the validation loss of a config after so many epochs.

    It falls towards a floor, which is lowest for a learning rate of 0.01 and for wide networks, and falls
    faster the higher the learning rate is: the order of configs after one epoch is not that after sixteen.
    """
    off = math.log10(config["learning_rate"]) + 2
    floor = 0.2 + 0.25 * off**2 + 0.1 / config["width"]
    return floor + math.exp(-epochs * (0.15 + 0.1 * (off + 2)))


def epoch_seconds(config: Mapping[str, float]) -> float:
    """Return the seconds of an epoch, which wide networks take longer for."""
    return UNIT_S * config["width"]


def pace(config: Mapping[str, float], began: float) -> None:
    """Sleep until an epoch that began at `began`, by the monotonic clock, has taken its time."""
    time.sleep(max(0.0, began + epoch_seconds(config) - time.monotonic()))
