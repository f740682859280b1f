"""Steps of a Keras optimizer over several batches, whose gradients are added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hetctl.model.errors import BadInputError


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
        variables = list(trainable_variables or self._optimizer._trainable_variables)
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
