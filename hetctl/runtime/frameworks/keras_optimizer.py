"""Optimizers of Keras: their learning rates, steps over several batches, and updates in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hetctl.model.errors import BadInputError


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
        # An optimizer of mixed precision wraps the one that has the rate.
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)
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


class KerasAccumulation:
    """Weighted sum of the gradients of the batches of one step; the optimizer steps with the last of them.

    Keras' own ``gradient_accumulation_steps`` is a constant, with equal weights for all batches.

    Parameters
    ----------
    add_up : callable
        Function from gradients of this rank to those of all ranks.

    Attributes
    ----------
    weight, ends_step : tf.Variable
        Share of the next batch in the samples of the step, and whether it is this rank's last.
    """

    def __init__(self, model: Any, add_up: Callable[[list[Any]], list[Any]]) -> None:
        self._optimizer = model.optimizer
        self._step = model.optimizer.apply
        self._add_up = add_up
        # Variables, because Python numbers would be constants of the traced step.
        self.weight = tf.Variable(1.0, trainable=False, dtype=tf.float64)
        self.ends_step = tf.Variable(True, trainable=False)
        # A traced step cannot create variables.
        self._totals = {
            id(variable): tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
            for variable in model.trainable_variables
        }
        model.optimizer.apply = self.apply

    def begin(self) -> None:
        """Begin a step: drop the gradients of one that was not finished."""
        for total in self._totals.values():
            total.assign(tf.zeros_like(total))

    def apply(self, gradients: Any, trainable_variables: Any = None) -> None:
        """Add gradients to those of the step; after its last batch, take the step with the sums.

        Raises
        ------
        BadInputError
            If a variable is not one of the model's.
        """
        known = trainable_variables or self._optimizer._trainable_variables
        gradients, variables = with_gradients(gradients, known)
        totals = [self._total_of(variable) for variable in variables]
        for total, gradient in zip(totals, gradients, strict=True):
            # Embeddings have sparse gradients.
            total.assign_add(tf.convert_to_tensor(gradient) * tf.cast(self.weight, total.dtype))

        def take_step() -> Any:
            self._step(self._add_up([tf.identity(total) for total in totals]), variables)
            for total in totals:
                total.assign(tf.zeros_like(total))
            return tf.constant(True)

        tf.cond(self.ends_step, take_step, lambda: tf.constant(False))

    def _total_of(self, variable: Any) -> Any:
        total = self._totals.get(id(variable))
        if total is None:
            raise BadInputError(
                f"train_fn trains {variable.path}, which is no variable of the model that model_fn returned",
                "make it one, or use batch_size in place of global_batch_size",
            )
        return total


def with_gradients(gradients: Sequence[Any], variables: Sequence[Any] | None) -> tuple[list[Any], Any]:
    """Leave out the variables that the loss does not depend on, whose gradients are None, as Keras does."""
    if variables is None:
        return list(gradients), None
    pairs = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
    return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]


class Turns:
    """Groups of operations of a graph, each of which runs after those of the group before."""

    def __init__(self) -> None:
        self._graph: Any = None
        self._done: list[Any] = []

    @contextmanager
    def next(self) -> Iterator[None]:
        """Add the operations of the next group to the present graph meanwhile."""
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._graph:
            self._graph, self._done = graph, []
        known = len(graph.get_operations())
        with tf.control_dependencies(self._done):
            yield
        # Reads and assignments of variables: every other operation of an update ends in one.
        self._done = [one for one in graph.get_operations()[known:] if one.op_def.is_stateful]


def update_in_turn(optimizer: Any) -> None:
    """Have an optimizer update one weight after another in compiled functions, with the same results.

    A graph runs what does not depend on one another in any order: the terms of the updates of all weights,
    of the size of these, would be in memory at once.
    """
    turns = Turns()
    clip, decay, step = optimizer._clip_gradients, optimizer._apply_weight_decay, optimizer.update_step

    def decay_in_turn(variables: Sequence[Any]) -> None:
        for variable in variables:
            with turns.next():
                decay([variable])

    def step_in_turn(gradient: Any, variable: Any, learning_rate: Any) -> None:
        with turns.next():
            step(*clip([gradient]), variable, learning_rate)

    # A stage has no clipping by the norm of all gradients: each weight's is clipped when its turn comes.
    optimizer._clip_gradients = list
    optimizer._apply_weight_decay = decay_in_turn
    optimizer.update_step = step_in_turn
