"""Weights of a parameter server, in versions of whole waves of all virtual workers (HetPipe, section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.methods.pipeline.wsp import GlobalClock

Weights = list[npt.NDArray[Any]]


class GlobalWeights:
    """Global weights of one layer.

    The version c is w_global with the waves 0 to c - 1 of every virtual worker, added wave by wave and in the
    order of the virtual workers: it does not depend on the order in which they arrive.

    Parameters
    ----------
    weights : list of array
        Initial weights, version 0.
    workers : int
        Number of virtual workers.
    """

    def __init__(self, weights: Weights, workers: int) -> None:
        self.clock = GlobalClock((0,) * workers)
        self._versions = {0: weights}
        self._waves: dict[tuple[int, int], Weights] = {}
        self._read = [0] * workers

    def push(self, worker: int, wave: int, updates: Sequence[npt.NDArray[Any]]) -> None:
        """Add the aggregated update of a wave; none: a virtual worker had no minibatches in it.

        Raises
        ------
        ValueError
            If earlier waves of that virtual worker are missing.
        """
        now = self.clock.now
        self.clock = self.clock.push(worker, wave)
        self._waves[worker, wave] = list(updates)
        for complete in range(now, self.clock.now):
            self._versions[complete + 1] = self._with(complete)
        self._forget()

    def at(self, waves: int) -> Weights | None:
        """Return the weights with a number of waves; None if some of these have not arrived."""
        return self._versions[waves] if waves <= self.clock.now else None

    def note_read(self, worker: int, waves: int) -> None:
        """Record that a virtual worker has these weights, and will not ask for earlier ones."""
        self._read[worker] = max(self._read[worker], waves)
        self._forget()

    def _with(self, wave: int) -> Weights:
        """Return the newest version plus a wave of all virtual workers."""
        before = self._versions[wave]
        weights = before
        for worker in range(len(self.clock.pushed)):
            updates = self._waves.pop((worker, wave))
            if updates and weights is before:
                weights = [weight + update for weight, update in zip(before, updates, strict=True)]
            elif updates:
                for weight, update in zip(weights, updates, strict=True):
                    np.add(weight, update, out=weight)
        return weights

    def _forget(self) -> None:
        oldest = min(*self._read, self.clock.now)
        for waves in [waves for waves in self._versions if waves < oldest]:
            del self._versions[waves]
