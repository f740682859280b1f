"""Steps of Keras networks: scaled losses, and weights without gradients."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from hetctl.model.ensemble import Member
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.frameworks.keras_model import KerasRate
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
