"""Stepwise transfer of samples from the slowest to the fastest worker (LB-BSP, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.balance.manager import FULL_MEMORY, Observation, StragglerWarning, checked_limits

FAST_STEP, FAST_WINDOW = 5, 5
"""Step Delta in samples and window D in iterations during the approach to the balance."""
FINE_STEP, FINE_WINDOW = 1, 20
"""Step and window after a leader has been slower than a straggler."""


class GpuManager:
    """Manager of Algorithm 2, for accelerators: the leader takes over samples from the straggler.

    Parameters
    ----------
    batches : sequence of int
        Batches of the first iteration; their sum is kept.
    caps : sequence of int or None
        Largest batch of each worker, None for no cap; empty if no worker has one.

    Raises
    ------
    BadInputError, InfeasibleError
        If batches and caps are inconsistent.
    """

    def __init__(self, batches: Sequence[int], caps: Sequence[int | None] = ()) -> None:
        self._limits = checked_limits(batches, caps)
        self._step, self._window = FAST_STEP, FAST_WINDOW
        self._recent: list[NDArray[np.float64]] = []
        self._ever_slower = np.zeros((len(batches), len(batches)), dtype=bool)
        self.batches = tuple(batches)
        self.warnings: tuple[StragglerWarning, ...] = ()

    def update(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Transfer one step of samples if the leader was faster throughout the window (Algorithm 2)."""
        seconds = np.array([seen.seconds for seen in observations])
        self._recent = [*self._recent, seconds][-FINE_WINDOW:]
        # Line 12 compares with all past iterations, not with the window alone.
        self._ever_slower |= seconds[:, None] > seconds[None, :]
        leader, straggler = self._leader(observations), int(seconds.argmax())
        # Lines 8 and 9: nothing moves, and a warning says that training is faster without the worker.
        if self.batches[straggler] <= self._step:
            self._warn(straggler)
        elif leader is not None and self._always_faster(leader, straggler):
            self._move(straggler, leader)
        elif leader is not None and self._ever_slower[leader, straggler]:
            self._step, self._window = FINE_STEP, FINE_WINDOW
        return self.batches

    def _leader(self, observations: Sequence[Observation]) -> int | None:
        """Return the fastest worker that can hold more samples (Algorithm 2, line 5); None if none can."""
        able = [
            worker
            for worker, seen in enumerate(observations)
            # Line 5: a GPU with less than 5 % of its memory free might run out of it.
            if seen.memory <= FULL_MEMORY and self.batches[worker] + self._step <= self._limits[worker]
        ]
        return min(able, key=lambda worker: observations[worker].seconds, default=None)

    def _always_faster(self, leader: int, straggler: int) -> bool:
        window = self._recent[-self._window :]
        return len(window) == self._window and all(past[leader] < past[straggler] for past in window)

    def _move(self, straggler: int, leader: int) -> None:
        batches = list(self.batches)
        batches[straggler] -= self._step
        batches[leader] += self._step
        self.batches = tuple(batches)

    def _warn(self, straggler: int) -> None:
        samples = self.batches[straggler]
        what = f"is the slowest with {samples} samples and cannot give away {self._step}"
        warning = StragglerWarning(straggler, f"{what}: training is faster without it")
        if warning not in self.warnings:
            self.warnings += (warning,)
