"""Keras models and optimizers: values of variables, batches of one size, and steps over several batches.

A compiled step is traced again for each new batch size: all batches get one size, and the padding is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hetctl.model.errors import BadInputError
from hetctl.runtime.frameworks.packed_state import other_variables


def compiled_step(step: Callable[..., Any]) -> Any:
    """Compile a step to a graph, as Keras' own steps are: without AutoGraph.

    AutoGraph would write the step's code into a temporary file.
    """
    return tf.function(step, reduce_retracing=True, autograph=False)


def compiled_model(returned: Any, name: str) -> Any:
    """Return the checked result of ``model_fn`` for the member of that name.

    Raises
    ------
    BadInputError
        If the result is not a compiled Keras model.
    """
    if not isinstance(returned, keras.Model) or getattr(returned, "optimizer", None) is None:
        raise BadInputError(
            f"model_fn returned {type(returned).__name__} for {name}, not a compiled Keras model",
            "return a keras.Model after model.compile(optimizer, loss, metrics)",
        )
    return returned


@contextmanager
def deferred_values() -> Iterator[list[Any]]:
    """Defer the values of new variables that have an initializer; yield the list of these variables.

    `give_values` computes the values; an assignment allocates a variable at once. Keras' own
    ``StatelessScope`` defers values, too, but refuses variables that begin with a number, such as an
    optimizer's.
    """
    deferred: list[Any] = []
    kind = keras.Variable
    initialise, assign = kind._initialize_with_initializer, kind._direct_assign

    def defer(variable: Any, initializer: Any) -> None:
        variable._value, variable._initializer = None, initializer
        deferred.append(variable)

    def assign_at_once(variable: Any, value: Any) -> None:
        if variable._value is None:
            variable._initialize(value)
        else:
            assign(variable, value)

    kind._initialize_with_initializer, kind._direct_assign = defer, assign_at_once
    try:
        yield deferred
    finally:
        kind._initialize_with_initializer, kind._direct_assign = initialise, assign


def give_values(variables: Iterator[Any]) -> None:
    """Compute the first values of variables that have none, with the seeds of the whole network.

    The order does not matter: an initializer gets its seed when it is constructed.
    """
    for variable in variables:
        if variable._value is None:
            variable._deferred_initialize()


def array_of(variable: Any) -> npt.NDArray[Any]:
    """Return a variable's values, without a copy if they are in the node's memory."""
    values = tf.convert_to_tensor(variable)
    try:
        return np.asarray(memoryview(values))
    except ValueError:  # The buffer protocol lacks types such as bfloat16.
        return np.asarray(values)


def assign_all(variables: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Assign arrays to the variables with their names; BadInputError for other names or shapes."""
    shapes = {name: tuple(variable.shape) for name, variable in variables.items()}
    saved = {name: tuple(array.shape) for name, array in arrays.items()}
    if different := {name for name, _ in shapes.items() ^ saved.items()}:
        raise other_variables(f"{min(different)} and {len(different) - 1} more")
    for name, variable in variables.items():
        variable.assign(arrays[name])


def ignore_padding(model: Any, rows: Any) -> None:
    """Make batch normalisation compute its moments from the first `rows` rows of a batch alone."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer._moments = _moments_of_samples(layer._moments, rows)


def _moments_of_samples(moments: Callable[[Any, Any], Any], rows: Any) -> Callable[[Any, Any], Any]:
    def of_samples(inputs: Any, mask: Any) -> Any:
        # A slice would cost each full batch a copy of its gradients.
        return tf.cond(
            rows < tf.shape(inputs)[0],
            lambda: moments(inputs[:rows], None if mask is None else mask[:rows]),
            lambda: moments(inputs, mask),
        )

    return of_samples


def first_samples(output: Any, rows: Any) -> Any:
    """Return the first rows of an output, with its Keras mask, which the loss uses."""
    first = output[:rows]
    mask = getattr(output, "_keras_mask", None)
    if mask is not None:
        first._keras_mask = mask[:rows]
    return first


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
        Factor of a schedule; 1 for a constant rate, which is a variable.
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
        """Set the total factor of a schedule."""
        self._scale_schedule(factor / self.factor)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the rate while the state of another network is restored; a schedule stays anyway."""
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
    """Weighted sum of the gradients of a step's batches; the optimizer steps after the last batch.

    Keras' own ``gradient_accumulation_steps`` is constant, and weights all batches equally.

    Parameters
    ----------
    add_up : callable
        Function that returns the sums of this rank's gradients over all ranks.

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
        """Begin a step; drop the gradients of an unfinished one."""
        for total in self._totals.values():
            total.assign(tf.zeros_like(total))

    def apply(self, gradients: Any, trainable_variables: Any = None) -> None:
        """Add gradients to the step's sums; after its last batch, take the step with them.

        Raises
        ------
        BadInputError
            If a variable is not one of the model's.
        """
        known = trainable_variables or self._optimizer._trainable_variables
        gradients, variables = with_gradients(gradients, known)
        if unknown := [variable.path for variable in variables if id(variable) not in self._totals]:
            raise BadInputError(
                f"train_fn trains {unknown[0]}, which is no variable of the model that model_fn returned",
                "make it one, or use batch_size in place of global_batch_size",
            )
        totals = [self._totals[id(variable)] for variable in variables]
        for total, gradient in zip(totals, gradients, strict=True):
            # Embeddings have sparse gradients.
            total.assign_add(tf.convert_to_tensor(gradient) * tf.cast(self.weight, total.dtype))

        def take_step() -> Any:
            self._step(self._add_up([tf.identity(total) for total in totals]), variables)
            for total in totals:
                total.assign(tf.zeros_like(total))
            return tf.constant(True)

        tf.cond(self.ends_step, take_step, lambda: tf.constant(False))


def with_gradients(gradients: Sequence[Any], variables: Sequence[Any] | None) -> tuple[list[Any], Any]:
    """Leave out variables that do not affect the loss and have the gradient None, as Keras does."""
    if variables is None:
        return list(gradients), None
    pairs = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
    return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]


def update_sequentially(optimizer: Any) -> None:
    """Make an optimizer update one weight after another in compiled functions, with the same results.

    A graph runs independent operations in any order: the temporary values of all updates, each as large as
    its weight, would be in memory at once.
    """
    graph, done = None, list[Any]()
    clip, decay, step = optimizer._clip_gradients, optimizer._apply_weight_decay, optimizer.update_step

    @contextmanager
    def next_weight() -> Iterator[None]:
        """Let new operations of the present graph run after those of the weight before."""
        nonlocal graph, done
        if (present := tf.compat.v1.get_default_graph()) is not graph:
            graph, done = present, []
        known = len(present.get_operations())
        with tf.control_dependencies(done):
            yield
        # Reads and assignments of variables: every other operation of an update ends in one.
        done = [one for one in present.get_operations()[known:] if one.op_def.is_stateful]

    def decay_sequentially(variables: Sequence[Any]) -> None:
        for variable in variables:
            with next_weight():
                decay([variable])

    def step_sequentially(gradient: Any, variable: Any, learning_rate: Any) -> None:
        with next_weight():
            step(*clip([gradient]), variable, learning_rate)

    # Stages do not clip by the norm of all gradients: each gradient is clipped in its turn.
    optimizer._clip_gradients = list
    optimizer._apply_weight_decay = decay_sequentially
    optimizer.update_step = step_sequentially
