"""Keras models: variables whose values are arrays or are still to come, and batches of one size.

A step that is compiled is traced again for every other size of its batches: all its batches get one size, and
the padding is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hetctl.model.errors import BadInputError

Step = TypeVar("Step", bound=Callable[..., Any])


def compiled_step(step: Step) -> Step:
    """Return a step as a graph, without AutoGraph, as Keras' own steps are: layers never have it.

    AutoGraph would write the step's code into a temporary file.
    """
    compiled: Step = tf.function(step, reduce_retracing=True, autograph=False)
    return compiled


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
    """Have variables that begin with an initializer get no values meanwhile; yield the list of these.

    `give_values` computes them. A variable that a value is assigned to gets its memory at once. Keras' own
    ``StatelessScope`` defers values in the same way, but refuses variables that begin with a number, such as
    those of optimizers.
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
    """Compute the first values of variables that have none; seeds are those of the whole network.

    An initializer gets its seed when it is constructed, so that the order does not matter.
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


def ignore_padding(model: Any, rows: Any) -> None:
    """Make batch normalisation compute its moments from the first `rows` rows of a batch alone."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer._moments = _moments_of_samples(layer._moments, rows)


def _moments_of_samples(moments: Callable[[Any, Any], Any], rows: Any) -> Callable[[Any, Any], Any]:
    def of_samples(inputs: Any, mask: Any) -> Any:
        # A slice of all rows would cost each full batch a copy of its gradients.
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
