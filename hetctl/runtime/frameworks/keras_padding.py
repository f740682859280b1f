"""Batches of one size in TensorFlow: a step that is compiled is traced again for every other size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


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
