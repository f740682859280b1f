"""Learning rates of a Keras optimizer: a variable, or a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras


@keras.saving.register_keras_serializable("hetctl")
class ScaledSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A learning-rate schedule times a constant (Capes et al., Equation 7)."""

    def __init__(self, schedule: Any, factor: float) -> None:
        super().__init__()
        self.schedule = schedule
        self.factor = factor

    def __call__(self, step: Any) -> Any:
        """Return the scaled rate at a step."""
        return self.schedule(step) * self.factor

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of a new instance."""
        return {"schedule": self.schedule, "factor": self.factor}


class KerasRate:
    """Learning rate of an optimizer.

    Attributes
    ----------
    factor : float
        Factor of a schedule, which is not a variable; 1 for a constant rate, which is one.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.factor = 1.0

    def scale(self, factor: float) -> None:
        """Multiply the rate."""
        if self._has_schedule:
            self._scale_schedule(factor)
        else:
            self._optimizer.learning_rate.assign(self._optimizer.learning_rate * factor)

    def restore(self, factor: float) -> None:
        """Set the factor of a schedule, which may have one already."""
        self._scale_schedule(factor / self.factor)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the rate while the state of another network is restored; a schedule is kept in any case."""
        constant = None if self._has_schedule else float(self._optimizer.learning_rate.numpy())
        yield
        self.restore(1.0)
        if constant is not None:
            self._optimizer.learning_rate.assign(constant)

    @property
    def _has_schedule(self) -> bool:
        schedule = keras.optimizers.schedules.LearningRateSchedule
        # The public property has the rate of the current step instead of the schedule.
        return isinstance(self._optimizer._learning_rate, schedule)

    def _scale_schedule(self, factor: float) -> None:
        if self._has_schedule and factor != 1.0:
            self.factor *= factor
            self._optimizer._learning_rate = ScaledSchedule(self._optimizer._learning_rate, factor)
