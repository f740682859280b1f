"""Padding of last batches: networks are traced once, and results do not change."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_networks import seed_all

from hetctl.model.ensemble import Member
from hetctl.runtime.data.batches import Batches, TrainingData, pad, validation_batches, weights_of
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import UNSHUFFLED, Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import UserFunctions

SAMPLES, HELD_OUT, BATCH = 71, 21, 16
GENERATOR = np.random.default_rng(1)
X = GENERATOR.normal(size=(SAMPLES + HELD_OUT, 6, 6, 3)).astype("float32")
Y = GENERATOR.normal(size=(SAMPLES + HELD_OUT, 2)).astype("float32")


def loaders():
    training = ArrayLoader(ArraySource(X[:SAMPLES], Y[:SAMPLES], "training"), Stream(SAMPLES, BATCH, 5))
    source = ArraySource(X[SAMPLES:], Y[SAMPLES:], "validation")
    return training, ArrayLoader(source, Stream(HELD_OUT, BATCH, UNSHUFFLED))


def built(framework, model_fn, train_fn=None):
    seed_all(framework, 3)
    functions = UserFunctions(lambda _: None, lambda _: model_fn(), train_fn)
    member = Member("m", {}, batch_size=BATCH)
    return load_framework(framework).build(member, functions, Group(), (X[:1], Y[:1]))


def part_of(loader, epoch, start, stop):
    batches = Batches(loader, epoch, start, Group(), lambda: batches.position >= stop)
    return batches


def train(network, epochs=3):
    """Train and evaluate, stopping once in the middle of an epoch as a member that resumes does."""
    training, held_out = loaders()
    results = []
    for epoch in range(1, epochs + 1):
        for start, stop in ((0, 2 * BATCH), (2 * BATCH, SAMPLES)):
            loss = network.train(part_of(training, epoch, start, stop))
        results.append((loss, network.evaluate(validation_batches(held_out, epoch, lambda: None))))
    return results


def keras_model(traces=None, **compiled):
    import keras

    class Traced(keras.layers.Layer):
        def call(self, inputs, training=False):
            if traces is not None and not isinstance(inputs, keras.KerasTensor):
                traces.append("training" if training else "evaluation")
            return inputs

    model = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            Traced(),
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        keras.optimizers.SGD(compiled.get("rate", 0.05), momentum=0.9),
        compiled.get("loss", "mse"),
        metrics=["mae", keras.metrics.RootMeanSquaredError()],
    )
    return model


def keras_padded_train_fn(data, model, _optimizer, _config):
    losses, sizes = [], []
    for x, y, weights in data.padded():
        losses.append(float(model.train_on_batch(x, y, sample_weight=weights)[0]))
        sizes.append(data.samples)
        model.reset_metrics()
    return float(np.average(losses, weights=sizes))


def keras_reference(model, epochs=3):
    """Train as Keras itself does, with smaller last batches; the results are as those of `train`."""
    training, _ = loaders()
    results = []
    for epoch in range(1, epochs + 1):
        losses, sizes = [], []
        for (x, y), _ in training.batches(epoch, 0):
            losses.append(float(model.train_on_batch(x, y)[0]))
            sizes.append(len(x))
            model.reset_metrics()
        evaluated = model.evaluate(X[SAMPLES:], Y[SAMPLES:], batch_size=BATCH, verbose=0, return_dict=True)
        loss = np.average(losses[2:], weights=sizes[2:])
        results.append((loss, {f"val_{name}": value for name, value in evaluated.items()}))
    return results


def assert_same(results, wanted):
    for (loss, metrics), (wanted_loss, wanted_metrics) in zip(results, wanted, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-4)
        assert metrics == pytest.approx(wanted_metrics, rel=1e-4)


@pytest.mark.training
@pytest.mark.parametrize("train_fn", [None, keras_padded_train_fn])
def test_keras_networks_are_traced_once_per_kind_of_step(train_fn):
    traces = []
    network = built("tensorflow", lambda: keras_model(traces), train_fn)
    traces.clear()
    train(network)
    assert sorted(traces) == ["evaluation", "training"]


@pytest.fixture
def double_precision():
    """In single precision another order of summation shows after some steps, and not on every processor."""
    import keras
    import torch

    torch.set_default_dtype(torch.float64)
    keras.config.set_floatx("float64")
    yield
    torch.set_default_dtype(torch.float32)
    keras.config.set_floatx("float32")


@pytest.mark.training
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("train_fn", [None, keras_padded_train_fn])
def test_padding_does_not_change_the_results_of_keras_networks(train_fn):
    padded = built("tensorflow", keras_model, train_fn)
    seed_all("tensorflow", 3)
    plain = keras_model()
    assert_same(train(padded), keras_reference(plain))
    for own, other in zip(padded._model.get_weights(), plain.get_weights(), strict=True):
        # The weights of samples are in single precision all the same.
        np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-5)


@pytest.mark.training
def test_loss_that_adds_up_over_a_batch_counts_its_samples_alone():
    import keras

    def summed():
        return keras_model(loss=keras.losses.MeanSquaredError(reduction="sum"), rate=1e-4)

    padded = built("tensorflow", summed)
    seed_all("tensorflow", 3)
    assert_same(train(padded, 1), keras_reference(summed(), 1))


def torch_parts(compiled_with=None, in_place=False, momentum=0.5):
    import torch
    from torch import nn

    torch._dynamo.reset()

    class Network(nn.Module):
        """Unlike a plain nn.Sequential, this can be compiled in place."""

        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(6, 4, 3, padding=1),
                nn.BatchNorm2d(4, momentum=momentum),
                nn.ReLU(),
                nn.Flatten(),
                nn.BatchNorm1d(72, momentum=momentum),
                nn.Linear(72, 2),
            )

        def forward(self, x):
            return self.layers(x)

    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    if compiled_with and in_place:
        model.compile(backend=compiled_with)
    elif compiled_with:
        model = torch.compile(model, backend=compiled_with)
    return {
        "model": model,
        "optimizer": optimizer,
        "loss": nn.MSELoss(),
        "metrics": {"mae": nn.functional.l1_loss},
    }


class CountingBackend:
    """A backend of ``torch.compile`` that counts graphs and runs them as they are."""

    def __init__(self):
        self.shapes = []

    def __call__(self, graph, inputs):
        self.shapes.append([tuple(value.shape) for value in inputs])
        return graph.forward


def torch_padded_train_fn(data, model, optimizer, _config):
    total = 0.0
    for x, y, weights in data.padded():
        optimizer.zero_grad()
        loss = (weights * (model(x) - y).square().mean(1)).mean()
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * data.samples / SAMPLES
    return total


@pytest.mark.training
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("train_fn", [None, torch_padded_train_fn])
def test_compiled_modules_are_traced_once_per_kind_of_step(in_place, train_fn):
    backend = CountingBackend()
    train(built("pytorch", lambda: torch_parts(backend, in_place), train_fn))
    assert len(backend.shapes) == 2, backend.shapes


@pytest.mark.training
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("momentum", [0.5, None])
def test_padding_does_not_change_results_of_compiled_modules(momentum):
    padded = built("pytorch", lambda: torch_parts(CountingBackend(), in_place=True, momentum=momentum))
    plain = built("pytorch", lambda: torch_parts(momentum=momentum))
    assert_same(train(padded), train(plain))
    for own, other in zip(
        padded._model.state_dict().values(), plain._model.state_dict().values(), strict=True
    ):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-9)


def test_padding_repeats_samples_and_gives_them_no_weight():
    x, y = pad((np.arange(3.0), np.arange(3)), 8)
    assert (x.tolist(), y.tolist()) == ([0, 1, 2, 0, 1, 2, 0, 1], [0, 1, 2, 0, 1, 2, 0, 1])
    weights = weights_of(3, 8)
    assert np.mean(weights * x) == pytest.approx(np.mean([0, 1, 2]))
    assert weights.tolist() == pytest.approx([8 / 3] * 3 + [0] * 5)


def test_padded_batches_have_full_size_and_count_their_samples():
    training, _ = loaders()
    data = TrainingData(Batches(training, 1, 0, Group(), lambda: False), BATCH)
    seen = [(len(x), len(y), len(weights), data.samples) for x, y, weights in data.padded()]
    assert seen == [(BATCH, BATCH, BATCH, 16)] * 4 + [(BATCH, BATCH, BATCH, 7)]


class Moving:
    """A balancer of two ranks that moves samples to the first one after its first step."""

    sizes = (BATCH, BATCH)
    batch_size = BATCH

    def before_step(self, _should_stop, left):
        if left < SAMPLES:
            self.sizes = (BATCH + 4, BATCH - 4)
        return False


def test_padded_batches_that_grow_have_weights_for_all_rows():
    stream = Stream(SAMPLES, 2 * BATCH, 5, ranks=2)
    loader = ArrayLoader(ArraySource(X[:SAMPLES], Y[:SAMPLES], "training"), stream)
    batches = Batches(loader, 1, 0, Group(), lambda: False, balancer=Moving())
    data = TrainingData(batches, BATCH)
    seen = [(len(x), len(weights), data.samples, weights.mean()) for x, _, weights in data.padded()]
    assert seen == [(16, 16, 16, 1), (20, 20, 20, 1), (16, 16, 4, 1)]
