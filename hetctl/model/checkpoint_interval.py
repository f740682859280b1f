"""Interval at which a member in training writes checkpoints."""

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
