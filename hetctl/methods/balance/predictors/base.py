"""The shape of every predictor of speeds (LB-BSP, section 3.2.2)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hetctl.model.errors import BadInputError

Values = NDArray[np.float64]


class Predictor(Protocol):
    """Predicts how fast each worker will be in the iteration that is about to start.

    At each boundary between two iterations, `observe` comes first and `predict` second.
    """

    def observe(self, speed: Values, cpu: Values, memory: Values) -> None:
        """Take in what is known before iteration k; all arrays have the shape (workers,).

        Parameters
        ----------
        speed : array
            In the iteration that has just ended, v^{k-1}, in samples/s, above zero.
        cpu, memory : array
            As they are now, c^k and m^k, in any unit that is the same for all workers; all equal where they
            are not measured.

        Raises
        ------
        BadInputError
            If there is not one value per worker, a speed is not above zero or a value is not finite;
            nothing is taken in then.
        """

    def predict(self) -> Values:
        """Return v^k in samples/s, above zero, of the shape (workers,).

        No prediction is outside of the speeds that the worker has had. Before the first observation, all
        workers are taken to be alike: 1.
        """


class ObservedRange:
    """The values that each worker has had so far, from the lowest to the highest."""

    def __init__(self, workers: int) -> None:
        self.lowest = np.full(workers, np.inf)
        self.highest = np.full(workers, -np.inf)

    def observe(self, values: Values) -> None:
        """Widen the range."""
        np.minimum(self.lowest, values, out=self.lowest)
        np.maximum(self.highest, values, out=self.highest)

    def clip(self, values: Values) -> Values:
        """Bring predictions into the range; what is not a number becomes the lowest value."""
        return np.fmin(np.fmax(values, self.lowest), self.highest)


def check(workers: int, speed: Values, cpu: Values, memory: Values) -> None:
    """Refuse observations of the wrong shape, not finite, or without speed.

    Raises
    ------
    BadInputError
        As in `Predictor.observe`.
    """
    for name, values in (("speed", speed), ("cpu", cpu), ("memory", memory)):
        if values.shape != (workers,):
            raise BadInputError(f"{name} has the shape {values.shape}, not one value for {workers} workers")
        wrong = np.flatnonzero(~np.isfinite(values))
        if wrong.size:
            raise BadInputError(f"{name} {values[wrong[0]]} of worker {wrong[0]} is not a finite number")
    if speed.min() <= 0:
        worker = int(speed.argmin())
        raise BadInputError(f"speed {speed[worker]:g} of worker {worker} is not above zero")
