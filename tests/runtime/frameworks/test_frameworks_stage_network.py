"""Stages of chains, in every framework: cut or whole, the training is the same."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_networks import ENSEMBLES, MODULES, functions_of, seed_all

from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.errors import BadInputError
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import load_functions

pytestmark = pytest.mark.training
SEED, BATCH, SAMPLES = 5, 16, 70
MOMENTUM = {"optimizer": "momentum", "batch_norm": True}
ADAM = {"optimizer": "adam", "decay": True}


def member_of(config):
    return Member("m", config, BATCH, SEED)


def loaded(framework):
    return load_functions(Ensemble("t", framework, functions_of(framework), (), str(ENSEMBLES)))


def batches(framework, epoch=1, samples=SAMPLES):
    (x, y), _ = loaded(framework).input_fn(None)
    loader = ArrayLoader(ArraySource(x[:samples], y[:samples], "training"), Stream(samples, BATCH, SEED))
    return Batches(loader, epoch, 0, Group(), lambda: False)


def whole_network(framework, config):
    seed_all(framework, SEED)
    (x, y), _ = loaded(framework).input_fn(None)
    return load_framework(framework).build(member_of(config), loaded(framework), Group(), (x[:1], y[:1]))


def weights_of(network):
    model = network._model
    if hasattr(model, "trainable_variables"):
        return [variable.numpy() for variable in model.trainable_variables]
    return [parameter.detach().numpy() for parameter in model.parameters()]


def chain_of(framework, config):
    seed_all(framework, SEED)
    return load_framework(framework).chain(member_of(config), loaded(framework))


def stages_of(framework, config, number, recomputes=False):
    """Return the chain in so many stages."""
    chain = chain_of(framework, config)
    (x, y), _ = loaded(framework).input_fn(None)
    bounds = np.linspace(0, len(chain.layers), number + 1).astype(int).tolist()
    cuts = [range(*bounds[i : i + 2]) for i in range(number)]
    return [chain.build(cut, (x[:1], y[:1]), recomputes=recomputes) for cut in cuts]


@pytest.fixture
def as_written(request):
    """Compute as the graph says: TensorFlow may otherwise round by rewriting terms across what are cuts."""
    if request.getfixturevalue("framework") != "tensorflow":
        yield
        return
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    yield
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True})


@pytest.fixture
def in_float64(request):
    if request.getfixturevalue("framework") == "tensorflow":
        import keras

        # The default policy remembers the type that it had at first.
        for set_type in (keras.config.set_floatx, keras.config.set_dtype_policy):
            set_type("float64")
        yield
        for set_type in (keras.config.set_floatx, keras.config.set_dtype_policy):
            set_type("float32")
    else:
        import torch

        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)


class PlainTorch:
    """A whole network that trains with gradients of given weights."""

    def __init__(self, network):
        self.parts = network._parts
        self.parameters = list(self.parts.model.parameters())

    def weights(self):
        return [parameter.detach().clone() for parameter in self.parameters]

    def set(self, weights):
        for parameter, values in zip(self.parameters, weights, strict=True):
            parameter.data.copy_(values)

    def gradients(self, x, y):
        import torch

        x, y = torch.tensor(x, dtype=torch.get_default_dtype()), torch.tensor(y)
        self.parts.optimizer.zero_grad()
        self.parts.loss(self.parts.model(x), y).backward()
        return [parameter.grad for parameter in self.parameters]

    def apply(self, gradients):
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.parts.optimizer.step()


class PlainKeras:
    """The same with Keras."""

    def __init__(self, network):
        self.model = network._model

    def weights(self):
        return [variable.numpy() for variable in self.model.trainable_variables]

    def set(self, weights):
        for variable, values in zip(self.model.trainable_variables, weights, strict=True):
            variable.assign(values)

    def gradients(self, x, y):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.model.loss(y, self.model(x, training=True))
        return tape.gradient(loss, self.model.trainable_variables)

    def apply(self, gradients):
        self.model.optimizer.apply(gradients, self.model.trainable_variables)


PLAIN = {"pytorch": PlainTorch, "tensorflow": PlainKeras}


class Pipeline:
    """Stages in one process: minibatches enter with the weights of the stages at that time."""

    def __init__(self, stages):
        self.stages = stages
        self.versions = {}

    def begin(self, minibatch, x):
        self.versions[minibatch] = [stage.version() for stage in self.stages]
        for stage, version in zip(self.stages[:-1], self.versions[minibatch], strict=False):
            x = stage.forward(minibatch, version, x)
        return x

    def end(self, minibatch, x, y):
        loss, gradient = self.stages[-1].forward_backward(minibatch, self.versions.pop(minibatch)[-1], x, y)
        for stage in self.stages[-2::-1]:
            gradient = stage.backward(minibatch, gradient)
        assert gradient is None
        for stage in self.stages:
            stage.update(minibatch)
        return loss

    def train(self, given, in_flight=1):
        """Train with so many minibatches between their passes; return the losses by samples."""
        losses, begun = [], []
        for minibatch, (x, y) in enumerate(given):
            begun.append((minibatch, np.array(self.begin(minibatch, x)), y.copy(), len(x)))
            # The memory of a batch may be used for the next one.
            x[...] = np.nan
            if len(begun) == in_flight:
                losses.append(self._ended(*begun.pop(0)))
        losses.extend(self._ended(*one) for one in begun)
        return float(np.average([loss for loss, _ in losses], weights=[count for _, count in losses]))

    def _ended(self, minibatch, x, y, count):
        return self.end(minibatch, x, y), count

    def evaluate(self, x, y):
        for stage in self.stages[:-1]:
            x = stage.infer(x)
        self.stages[-1].score(x, y)

    def weights(self):
        return [weights for stage in self.stages for weights in stage.weights()]


def copies(given):
    return ((x.copy(), y.copy()) for x, y in given)


def differing(one, other):
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if not np.array_equal(a, b)]


@pytest.mark.parametrize(
    ("config", "numbers"), [(MOMENTUM, (1, 2, 3)), (ADAM, (3,))], ids=["momentum", "adam"]
)
@pytest.mark.parametrize("framework", MODULES)
@pytest.mark.usefixtures("as_written")
def test_stages_train_as_the_whole_network_to_the_bit(framework, config, numbers):
    whole = whole_network(framework, config)
    losses = [whole.train(batches(framework, epoch)) for epoch in (1, 2)]
    _, (x, y) = loaded(framework).input_fn(None)
    metrics = whole.evaluate([((x[:16], y[:16]), 16), ((x[16:25], y[16:25]), 9)])
    for number in numbers:
        pipeline = Pipeline(stages_of(framework, config, number))
        for epoch, loss in zip((1, 2), losses, strict=True):
            assert pipeline.train(copies(batches(framework, epoch))) == pytest.approx(loss, rel=1e-6)
            for stage in pipeline.stages:
                stage.end_epoch()
        assert differing(pipeline.weights(), weights_of(whole)) == []
        pipeline.evaluate(x[:16], y[:16])
        pipeline.evaluate(x[16:25], y[16:25])
        assert pipeline.stages[-1].scores() == (pytest.approx(metrics, rel=1e-6), 25)


@pytest.mark.parametrize("framework", MODULES)
@pytest.mark.usefixtures("in_float64")
def test_minibatches_in_flight_keep_the_weights_they_began_with(framework):
    config = {"optimizer": "momentum", "batch_norm": True, "learning_rate": 0.1}
    plain = PLAIN[framework](whole_network(framework, config))
    begun = []

    def end(version, x, y):
        present = plain.weights()
        plain.set(version)
        gradients = plain.gradients(x, y)
        plain.set(present)
        plain.apply(gradients)

    for x, y in copies(batches(framework)):
        begun.append((plain.weights(), x, y))
        if len(begun) == 3:
            end(*begun.pop(0))
    for one in begun:
        end(*one)
    pipeline = Pipeline(stages_of(framework, config, 3))
    pipeline.train(copies(batches(framework)), in_flight=3)
    for got, wanted in zip(pipeline.weights(), plain.weights(), strict=True):
        np.testing.assert_allclose(got, np.array(wanted), rtol=0, atol=1e-12)
    other = Pipeline(stages_of(framework, config, 3))
    other.train(copies(batches(framework)), in_flight=1)
    assert np.abs(other.weights()[0] - pipeline.weights()[0]).max() > 1e-6


@pytest.mark.parametrize("framework", MODULES)
@pytest.mark.usefixtures("as_written")
def test_passes_that_are_computed_again_have_the_same_bits(framework):
    config = MOMENTUM | {"dropout": 0.3}
    found = []
    for recomputes in (False, True):
        pipeline = Pipeline(stages_of(framework, config, 3, recomputes))
        loss = pipeline.train(copies(batches(framework)), in_flight=3)
        found.append((loss, saved(pipeline)))
    (loss, kept), (again, recomputed) = found
    assert loss == again
    assert kept.keys() == recomputed.keys()
    assert [name for name in kept if not np.array_equal(kept[name], recomputed[name])] == []


@pytest.mark.parametrize("framework", MODULES)
def test_updates_do_not_change_a_version_in_use(framework):
    first, last = stages_of(framework, {"optimizer": "adam", "batch_norm": True}, 2)
    x, y = next(iter(copies(batches(framework))))
    x.flags.writeable = False  # as the memory of a message is
    versions = [[first.version(), last.version()]]
    outputs = [first.forward(0, versions[0][0], x).copy()]
    for minibatch in (0, 1):
        _, gradient = last.forward_backward(minibatch, last.version(), outputs[-1], y)
        first.backward(minibatch, gradient)
        first.update(minibatch)
        last.update(minibatch)
        versions.append([first.version(), last.version()])
        outputs.append(first.forward(minibatch + 1, versions[-1][0], x).copy())
    again = [first.forward(9 + i, version, x) for i, (version, _) in enumerate(versions)]
    assert differing(again, outputs) == []
    assert differing(outputs[:2], outputs[1:]) == [0, 1]
    losses = [
        last.forward_backward(9 + i, version, outputs[0], y)[0] for i, (_, version) in enumerate(versions)
    ]
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("framework", MODULES)
def test_updates_are_what_weights_have_gained(framework):
    pipeline = Pipeline(stages_of(framework, MOMENTUM, 2))

    def gained():
        return [update for stage in pipeline.stages for update in stage.updates()]

    first = pipeline.weights()
    assert not any(np.any(update) for update in gained())
    pipeline.train(copies(batches(framework)))
    wave = gained()
    for before, update, now in zip(first, wave, pipeline.weights(), strict=True):
        assert np.any(update)
        np.testing.assert_allclose(before + update, now, rtol=0, atol=1e-6)
    pipeline.train(copies(batches(framework, 2)))
    local = [now - then for now, then in zip(pipeline.weights(), map(np.add, first, wave), strict=True)]
    sent = [weights + 1 for weights in first]
    for stage in pipeline.stages:
        stage.set_global_weights([sent.pop(0) for _ in stage.weights()])
    for before, update, now in zip(first, local, pipeline.weights(), strict=True):
        np.testing.assert_allclose(before + 1 + update, now, rtol=0, atol=1e-6)
    for update, expected in zip(gained(), local, strict=True):
        np.testing.assert_allclose(update, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("config", "slots"), [(MOMENTUM, 1), (ADAM, 2)], ids=["momentum", "adam"])
@pytest.mark.parametrize("framework", MODULES)
def test_slots_take_the_memory_that_the_optimizer_keeps(framework, config, slots):
    pipeline = Pipeline(stages_of(framework, config, 2))
    pipeline.train(copies(batches(framework)))
    for stage in pipeline.stages:
        weights = sum(array.nbytes for array in stage.weights())
        # PyTorch's Adam counts its steps for each weight.
        counters = 4 * len(stage.weights()) * (framework == "pytorch" and slots == 2)
        assert stage.slot_bytes() == slots * weights + counters


def saved(pipeline):
    """Return the state of all stages; what they have in common is equal."""
    together = {}
    for stage in pipeline.stages:
        state = {name: np.array(array) for name, array in stage.save().items()}
        common = [name for name in state if name in together]
        assert differing([together[name] for name in common], [state[name] for name in common]) == []
        together |= state
    return together


@pytest.mark.parametrize("config", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("framework", MODULES)
@pytest.mark.usefixtures("as_written")
def test_training_continues_in_other_stages_to_the_bit(framework, config):
    whole = Pipeline(stages_of(framework, config, 1))
    for stage in whole.stages:
        stage.scale_learning_rate(3)
    whole.train(copies(batches(framework)), in_flight=2)
    whole.stages[0].end_epoch()
    state = saved(whole)
    whole.train(copies(batches(framework, 2)))
    cut = Pipeline(stages_of(framework, config, 3))
    cut.train(copies(batches(framework, 3)))
    for stage in cut.stages:
        stage.restore(state)
    assert not any(np.any(update) for stage in cut.stages for update in stage.updates())
    cut.train(copies(batches(framework, 2)))
    assert differing(cut.weights(), whole.weights()) == []
    one, other = saved(whole), saved(cut)
    names = [name for name in one if "generators" not in name and not name.endswith("structure")]
    assert len(names) > 4
    assert differing([one[name] for name in names], [other[name] for name in names]) == []
    statistics = [values for stage in cut.stages for values in stage.statistics()]
    assert differing(statistics, whole.stages[0].statistics()) == []
    for stage in cut.stages:
        stage.set_statistics([values + 1 for values in stage.statistics()])
    raised = [values for stage in cut.stages for values in stage.statistics()]
    assert differing(raised, [values + 1 for values in statistics]) == []


@pytest.mark.parametrize("framework", MODULES)
def test_an_adopted_state_keeps_the_own_learning_rate(framework):
    own, other = ({"optimizer": "sgd", "learning_rate": rate} for rate in (0.02, 0.1))
    parent, child = Pipeline(stages_of(framework, other, 1)), Pipeline(stages_of(framework, own, 2))
    parent.stages[0].scale_learning_rate(3)
    parent.train(copies(batches(framework)))
    for stage in child.stages:
        stage.adopt(saved(parent))
    before = parent.weights()
    assert differing(child.weights(), before) == []
    for pipeline in (parent, child):
        pipeline.train(copies(batches(framework, 2, BATCH)))
    for first, of_parent, of_child in zip(before, parent.weights(), child.weights(), strict=True):
        np.testing.assert_allclose(of_child - first, (of_parent - first) * 0.02 / 0.3, atol=1e-7)


@pytest.mark.parametrize("framework", MODULES)
def test_state_of_another_network_is_refused(framework):
    (stage,) = stages_of(framework, {}, 1)
    for config in ({"units": 31}, {"batch_norm": True}):
        (other,) = stages_of(framework, config, 1)
        with pytest.raises(BadInputError, match="the checkpoint has other variables than the network"):
            other.restore(stage.save())


@pytest.mark.parametrize("framework", MODULES)
def test_stages_draw_numbers_of_their_own_for_dropout(framework):
    pipeline = Pipeline(stages_of(framework, {"dropout": 0.5}, 2))
    losses = [pipeline.train(copies(batches(framework)), in_flight=2) for _ in range(6)]
    assert losses[-1] < losses[0]
