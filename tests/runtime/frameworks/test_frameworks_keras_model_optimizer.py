"""Updates of Keras optimizers one weight after another: the same results in less memory."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from hetctl.runtime.frameworks.keras_model import update_sequentially
from hetctl.runtime.frameworks.tensorflow import PoolMemory

pytestmark = pytest.mark.training
WEIGHTS, SIDE = 8, 1024
WEIGHT_BYTES = 4 * SIDE**2
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "nadam": lambda: keras.optimizers.Nadam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "decay": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1, clipnorm=0.5, use_ema=True),
    "clipped": lambda: keras.optimizers.Adam(0.1, clipvalue=0.2, amsgrad=True),
    "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


def variables_of(side, number):
    rng = np.random.default_rng(0)
    return [keras.Variable(rng.random((side, side), np.float32)) for _ in range(number)]


def updating(optimizer, variables):
    """Return a compiled function that applies gradients."""
    optimizer.build(variables)
    return tf.function(lambda gradients: optimizer.apply(gradients, variables))


def trained(make, sequentially):
    variables, optimizer, rng = variables_of(3, 4), make(), np.random.default_rng(1)
    if sequentially:
        update_sequentially(optimizer)
    update = updating(optimizer, variables)
    for _ in range(4):
        update([tf.constant(rng.normal(size=(3, 3)), tf.float32) for _ in variables])
    return [value.numpy() for value in (*variables, *optimizer.variables)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_in_turn_give_the_same_weights_and_slots(name):
    together, sequentially = (trained(OPTIMIZERS[name], taken) for taken in (False, True))
    for expected, found in zip(together, sequentially, strict=True):
        np.testing.assert_array_equal(expected, found)


@pytest.mark.parametrize("name", ["momentum", "decay"])
def test_updates_in_turn_take_the_memory_of_few_terms(name):
    variables, optimizer, gauge = variables_of(SIDE, WEIGHTS), OPTIMIZERS[name](), PoolMemory(tf)
    optimizer.use_ema = False
    update_sequentially(optimizer)
    update = updating(optimizer, variables)
    gradients = [tf.random.normal((SIDE, SIDE)) for _ in variables]
    update(gradients)
    before = gauge.used()
    gauge.reset_peak()
    update(gradients)
    # At once, the terms of all weights take more than the weights themselves.
    assert gauge.peak() - before < WEIGHTS / 2 * WEIGHT_BYTES
