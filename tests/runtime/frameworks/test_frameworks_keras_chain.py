"""Chains in Keras: models that can be cut, first weights, and the memory of a stage built alone."""

from __future__ import annotations

import gc
import itertools

import keras
import numpy as np
import pytest
from keras import layers

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import UserFunctions

pytestmark = pytest.mark.training
MEMBER = Member("m", {}, 8, 3)
SAMPLE = np.ones((1, 8, 8, 1), np.float32), np.zeros((1, 2), np.float32)


def functions(model_fn, optimizer=keras.optimizers.Adam):
    def compiled(_config):
        model = model_fn()
        model.compile(optimizer(), "mse")
        return model

    return UserFunctions(lambda _: None, compiled, None)


def chain(model_fn, optimizer=keras.optimizers.Adam):
    keras.backend.clear_session()
    return load_framework("tensorflow").chain(MEMBER, functions(model_fn, optimizer))


def whole(model_fn):
    keras.utils.set_random_seed(3)
    return load_framework("tensorflow").build(MEMBER, functions(model_fn), Group(), SAMPLE)._model


def residual():
    """Blocks with skips, models inside, and a base that is always called as in evaluation."""
    inputs = keras.Input((8, 8, 1), name="images")
    x = layers.Conv2D(4, 3, padding="same", name="stem")(inputs)
    for number in range(2):
        y = layers.Conv2D(4, 3, padding="same", name=f"conv{number}")(x)
        y = layers.BatchNormalization(name=f"norm{number}")(y)
        x = layers.ReLU(name=f"relu{number}")(layers.Add(name=f"add{number}")([x, y]))
    frozen = keras.Sequential([keras.Input((8, 8, 4)), layers.BatchNormalization()], name="frozen")
    x = frozen(x, training=False)
    head = keras.Sequential([layers.Flatten(name="flat"), layers.Dropout(0.5, name="drop")], name="head")
    return keras.Model(inputs, layers.Dense(2, name="dense")(head(x)))


def unbuilt():
    return keras.Sequential(
        [layers.Flatten(), keras.Sequential([layers.Dense(3), layers.Dropout(0.1)]), layers.Dense(2)]
    )


def set_by_hand():
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(3), layers.Dense(2)])
    model.layers[1].set_weights([np.full((64, 3), 0.25), np.arange(3)])
    model.layers[2].bias.assign([7.0, 8.0])
    return model


NAMES = {
    residual: ("stem", "conv0 .. add0", "relu0", "conv1 .. add1", "relu1", "frozen", "flat", "drop", "dense"),
    unbuilt: ("flatten", "dense", "dropout", "dense_1"),
    set_by_hand: ("flatten", "dense", "dense_1"),
}


@pytest.mark.parametrize("model_fn", NAMES, ids=lambda one: one.__name__)
def test_layers_alone_begin_with_the_bits_of_the_whole_model(model_fn):
    cut = chain(model_fn)
    assert cut.layers == NAMES[model_fn]
    stages = [cut.build(range(i, i + 1), SAMPLE) for i in range(len(cut.layers))]
    expected = whole(model_fn)
    got = [weights.tobytes() for stage in stages for weights in stage.weights()]
    assert got == [variable.numpy().tobytes() for variable in expected.trainable_variables]
    x = np.random.default_rng(1).normal(size=(5, 8, 8, 1)).astype("float32")
    outputs = expected(x, training=False).numpy()
    for stage in stages:
        x = stage.infer(x)
    np.testing.assert_allclose(x, outputs, rtol=1e-5, atol=1e-6)


def tied():
    dense = layers.Dense(4, name="again")
    inputs = keras.Input((4,))
    return keras.Model(inputs, dense(layers.ReLU(name="relu")(dense(inputs))))


def two_inputs():
    inputs = [keras.Input((4,)), keras.Input((4,))]
    return keras.Model(inputs, layers.Dense(2)(layers.Add()(inputs)))


def skip_over_all():
    inputs = keras.Input((4,), name="four")
    x = layers.Dense(4, name="wide")(inputs)
    return keras.Model(inputs, layers.Add(name="sum")([inputs, layers.ReLU(name="relu")(x)]))


def masked():
    return keras.Sequential([keras.Input((4,)), layers.Embedding(9, 3, mask_zero=True, name="words"),
                             layers.LSTM(3, name="sentence")])  # fmt: skip


def clipped():
    return keras.optimizers.SGD(0.1, global_clipnorm=1.0)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())


def momentum():
    return keras.optimizers.SGD(0.5, momentum=0.9)


class Subclass(keras.Model):
    def call(self, inputs):
        return inputs


def plain():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])


@pytest.mark.parametrize(
    ("model_fn", "optimizer", "problem"),
    [
        (Subclass, keras.optimizers.Adam, "returned Subclass, a model with methods of its own for m"),
        (two_inputs, keras.optimizers.Adam, "returned a model with 2 inputs and 1 outputs for m"),
        (tied, keras.optimizers.Adam, "returned weights that layers again and again share for m"),
        (skip_over_all, keras.optimizers.Adam, r"returned one layer alone, wide .. sum, for m"),
        (masked, keras.optimizers.Adam, "returned one layer alone, words .. sentence, for m"),
        (plain, clipped, "SGD with global_clipnorm"),
        (plain, scaled, "LossScaleOptimizer"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_by_name(model_fn, optimizer, problem):
    with pytest.raises(BadInputError, match=problem):
        chain(model_fn, optimizer)


def test_an_optimizer_with_state_of_no_one_weight_is_refused():
    cut = chain(plain, keras.optimizers.Adafactor)
    with pytest.raises(
        BadInputError, match="the optimizer Adafactor has state that belongs to no one weight"
    ):
        cut.build(range(1), (np.ones((1, 4)), np.ones((1, 2))))


def test_losses_of_layers_have_gradients_in_every_stage():
    def model_fn():
        rule = keras.regularizers.L2(0.1)
        dense = (layers.Dense(3, kernel_regularizer=rule, activity_regularizer=rule) for _ in range(3))
        return keras.Sequential([keras.Input((4,)), *dense, layers.Dense(2)])

    x, y = np.random.default_rng(2).normal(size=(2, 8, 4)).astype("float32")
    y, samples = y[:, :2], (x[:1], y[:1, :2])
    results = []
    for bounds in ((0, 4), (0, 2, 4)):
        cut = chain(model_fn, momentum)
        stages = [cut.build(range(*pair), samples) for pair in itertools.pairwise(bounds)]
        passed = x
        for stage in stages[:-1]:
            passed = stage.forward(1, stage.version(), passed)
        _, gradient = stages[-1].forward_backward(1, stages[-1].version(), passed, y)
        for stage in stages[-2::-1]:
            stage.backward(1, gradient)
        for stage in stages:
            stage.update(1)
        results.append([weights for stage in stages for weights in stage.weights()])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def wide():
    return keras.Sequential([keras.Input((100,)), *(layers.Dense(100) for _ in range(30))])


def held_bytes():
    """Return the bytes of all variables that exist."""
    gc.collect()
    # isinstance() asks each object for its class: those of PyTorch that are deprecated answer with a warning.
    variables = [one for one in gc.get_objects() if issubclass(type(one), keras.Variable)]
    return sum(one.numpy().nbytes for one in variables if one._value is not None)


def test_other_layers_have_no_memory():
    layer_bytes = 4 * 100 * 101
    keras.backend.clear_session()
    before = held_bytes()
    cut = chain(wide, momentum)
    assert held_bytes() - before < 100
    stage = cut.build(range(4, 9), (np.ones((1, 100)), np.ones((1, 100))))
    # The other half are the slots of momentum.
    assert 0 <= held_bytes() - before - 10 * layer_bytes < 100
    assert sum(weights.nbytes for weights in stage.weights()) == 5 * layer_bytes
