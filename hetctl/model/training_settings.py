"""Settings of training in ensemble files: the interval of checkpoints, and balanced batches (LB-BSP)."""

from __future__ import annotations

from dataclasses import dataclass

EPOCHS, STEPS, SECONDS = "epochs", "steps", "seconds"
"""Units of intervals."""


@dataclass(frozen=True)
class CheckpointInterval:
    """Training after which the next checkpoint is due; by default an epoch.

    Parameters
    ----------
    every : int
        Number of units.
    unit : str
        `EPOCHS`, `STEPS` or `SECONDS`.
    """

    every: int = 1
    unit: str = EPOCHS

    @property
    def is_timed(self) -> bool:
        """True if it is a time, whatever is trained in it."""
        return self.unit == SECONDS

    def saves_of_epoch(self, steps: float, seconds: float) -> float:
        """Return the number of checkpoints that an epoch of so many steps and seconds needs."""
        return {EPOCHS: 1.0, STEPS: steps, SECONDS: seconds}[self.unit] / self.every


EVERY_EPOCH = CheckpointInterval()

AUTO, ON, OFF = "auto", "on", "off"
BALANCE_MODES = (AUTO, ON, OFF)
MANAGERS = ("cpu", "gpu", "curve")
"""Managers of batch sizes: Algorithm 1 and Algorithm 2 of LB-BSP, and time curves learnt online."""
PREDICTORS = ("memoryless", "narx")
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
