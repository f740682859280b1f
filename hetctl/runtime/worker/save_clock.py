"""Time of the next checkpoint of a member in training."""

from __future__ import annotations

import time
from collections.abc import Callable

from hetctl.model.training_settings import EPOCHS, SECONDS, STEPS, CheckpointInterval


class SaveClock:
    """Count of what was trained since the last checkpoint, on one rank; only rank 0 decides by it.

    Parameters
    ----------
    now : callable
        Clock in seconds.
    """

    def __init__(self, interval: CheckpointInterval, now: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._now = now
        self.restart()

    def restart(self) -> None:
        """Begin the next interval: training starts, or a checkpoint is being written."""
        self._since = self._now()
        self._counts = {EPOCHS: 0, STEPS: 0}

    def count(self, unit: str) -> None:
        """Count an epoch, or a step."""
        self._counts[unit] += 1

    def is_due(self) -> bool:
        """Return true if the interval is over."""
        counts = {**self._counts, SECONDS: self._now() - self._since}
        return counts[self._interval.unit] >= self._interval.every
