"""Steps of Keras networks: scaled losses, weights without gradients, and updates of one weight at a time."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from hetctl.model.ensemble import Member
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.frameworks.keras_model import KerasRate, update_sequentially
from hetctl.runtime.frameworks.keras_network import make_variables
from hetctl.runtime.frameworks.tensorflow import PoolMemory
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import UserFunctions

pytestmark = pytest.mark.training
SAMPLES = 16
X = np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype(np.float32)
Y = X @ np.ones((4, 2), np.float32)


class WithUnused(keras.Model):
    """A network one of whose layers takes no part in the results."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = keras.layers.Dense(2), keras.layers.Dense(3)

    def build(self, shape):
        self.used.build(shape)
        self.unused.build(shape)

    def call(self, x):
        return self.used(x)


@pytest.fixture(autouse=True)
def policy():
    """Restore the usual policy after each test."""
    yield
    keras.config.set_dtype_policy("float32")


def model_of(optimizer, policy="float32"):
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, dtype=policy)])
    model.compile(optimizer=optimizer(), loss="mse")
    return model


def step(model, **sizes):
    """Train one step of hetctl with all samples."""
    functions = UserFunctions(lambda _: None, lambda _: model, None)
    member = Member("m", {}, **({"batch_size": SAMPLES} | sizes))
    network = load_framework("tensorflow").build(member, functions, Group(), (X[:8], Y[:8]))
    stream = Stream(SAMPLES, SAMPLES, 5)
    batches = Batches(
        ArrayLoader(ArraySource(X, Y, "training"), stream),
        *(1, 0, Group(), lambda: False),
        most=member.micro_batch_size,
    )
    network.train(batches)
    return [np.array(weight) for weight in model.get_weights()]


@pytest.mark.parametrize(
    ("optimizer", "policy"),
    [
        (lambda: keras.optimizers.SGD(0.1), "mixed_float16"),
        (lambda: keras.optimizers.SGD(0.1, loss_scale_factor=1024), "float32"),
    ],
)
def test_a_scaled_loss_trains_as_in_keras(optimizer, policy):
    begun = model_of(optimizer, policy).get_weights()
    reference = model_of(optimizer, policy)
    reference.train_on_batch(X, Y)
    trained = step(model_of(optimizer, policy))
    for before, own, expected in zip(begun, trained, reference.get_weights(), strict=True):
        assert own - before == pytest.approx(expected - before, rel=0.02, abs=1e-4)
        assert np.abs(own - before).max() > 0.001


def test_the_rate_of_a_wrapped_optimizer_is_scaled():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
    inner = keras.optimizers.SGD(schedule)
    rate = KerasRate(keras.optimizers.LossScaleOptimizer(inner))
    rate.scale(4.0)
    assert float(inner.learning_rate) == pytest.approx(2.0)
    with rate.kept():
        pass
    assert float(inner.learning_rate) == pytest.approx(0.5)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_weights_without_gradients_stay_where_batches_add_up():
    def built():
        keras.utils.set_random_seed(3)
        model = WithUnused()
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        model.build((None, 4))
        return model

    begun, whole = built().get_weights(), step(built())
    parts = step(built(), batch_size=8, global_batch_size=SAMPLES)
    for before, one, other in zip(begun, whole, parts, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
        assert np.array_equal(before, one) == (before.shape in {(4, 3), (3,)})


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


def test_a_metric_that_divides_by_its_samples_has_a_name_before_the_first():
    class Error(keras.metrics.MeanSquaredError):
        def result(self):
            return float(self.total) / float(self.count)

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Error(name="error")])
    sample = np.ones((1, 2), "float32"), np.ones((1, 1), "float32")
    assert make_variables(model, *sample) == ["loss", "error"]
    with pytest.raises(ZeroDivisionError):
        model.get_metrics_result()
