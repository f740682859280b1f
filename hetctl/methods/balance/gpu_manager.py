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
PAPER_BATCH = 32
"""Batch of a worker in the paper's evaluation. Larger ones begin with a step in proportion, before the two of
the paper: with 512 samples, 5 at a time would take more than 30 iterations."""
CHANGED = 1.5
"""Growth of the straggler's time over the leader's, since steps are fine, that counts as a change of
conditions: steps are then coarse again. The paper's GPUs keep their speed (section 3.3)."""


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
        coarse = FAST_STEP * (sum(batches) // (PAPER_BATCH * len(batches)))
        first = [(coarse, FAST_WINDOW)] if coarse > FAST_STEP else []
        self._levels = (*first, (FAST_STEP, FAST_WINDOW), (FINE_STEP, FINE_WINDOW))
        self._recent: list[NDArray[np.float64]] = []
        self._enter(0)
        self.batches = tuple(batches)
        self.warnings: tuple[StragglerWarning, ...] = ()
        self.learner: None = None

    def update(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Transfer one step of samples if the leader was faster throughout the window (Algorithm 2)."""
        seconds = np.array([seen.seconds for seen in observations])
        self._recent = [*self._recent, seconds][-FINE_WINDOW:]
        # Line 12 compares with all past iterations, not with the window alone.
        self._ever_slower |= seconds[:, None] > seconds[None, :]
        if self._have_conditions_changed():
            self._enter(0)
        straggler = int(seconds.argmax())
        faster = self._faster(observations, straggler)
        # After the step's size: the leader must have room for a step of that size.
        able = [worker for worker in faster if self.batches[worker] + self._step <= self._limits[worker]]
        leader = min(able, key=lambda worker: seconds[worker], default=straggler)
        if not faster:
            return self.batches  # as after a tie
        if self.batches[straggler] <= self._step:
            self._stop_at(straggler)
        elif not able:
            self._enter_finer()  # others may hold a few samples more
        elif self._always_faster(leader, straggler):
            self._move(straggler, leader)
        elif self._ever_slower[leader, straggler]:
            self._enter_finer()
        return self.batches

    def _enter(self, level: int) -> None:
        """Use the step and window of a level; those of the last one stay until conditions change."""
        self._level = level
        self._step, self._window = self._levels[level]
        workers = len(self._limits)
        self._ever_slower = np.zeros((workers, workers), dtype=bool)
        self._least_gap = np.inf

    def _enter_finer(self) -> None:
        if self._step != FINE_STEP:
            self._enter(self._level + 1)

    def _have_conditions_changed(self) -> bool:
        """Return true if the straggler has fallen far behind, for a window, after the balance was near."""
        window = self._recent[-FAST_WINDOW:]
        if self._step != FINE_STEP or len(window) < FAST_WINDOW:
            return False
        # A process beside the worker makes single iterations as slow, or as fast, as any.
        seconds = np.median(window, axis=0)
        gap = float(seconds.max() / seconds.min())
        self._least_gap = min(self._least_gap, gap)
        return gap > CHANGED * self._least_gap

    def _stop_at(self, straggler: int) -> None:
        """Move nothing, and warn that training is faster without the worker (lines 8 and 9).

        The steps for large batches are not the paper's: they become smaller first.
        """
        if self._step > FAST_STEP:
            self._enter(self._level + 1)
        else:
            self._warn(straggler)

    def _faster(self, observations: Sequence[Observation], straggler: int) -> list[int]:
        """Return the workers that took less time than the straggler and have free memory (line 5)."""
        return [
            worker
            for worker, seen in enumerate(observations)
            # A GPU with less than 5 % of its memory free might run out of it.
            if seen.memory <= FULL_MEMORY and seen.seconds < observations[straggler].seconds
        ]

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
