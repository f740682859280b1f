"""Chains and stages in PyTorch: what can be cut, first weights, groups of parameters, and memory."""

from __future__ import annotations

import copy
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import UserFunctions

pytestmark = pytest.mark.training
MEMBER = Member("m", {}, 8)
SAMPLE = np.zeros((1, 6), np.float32), np.zeros((1, 2), np.float32)


def functions(model_fn, **more):
    def whole_fn(_config):
        model = model_fn()
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if list(model.parameters()) else None
        return {"model": model, "optimizer": optimizer, "loss": nn.MSELoss(), **more}

    return UserFunctions(lambda _: None, whole_fn, None)


def returning(model_fn):
    """Return functions whose ``model_fn`` returns all parts."""
    return UserFunctions(lambda _: None, lambda _: model_fn(), None)


def chain(model_fn, **more):
    return prepared().chain(MEMBER, functions(model_fn, **more))


def prepared():
    framework = load_framework("pytorch")
    framework.prepare((0,), None, 3)
    return framework


def whole(model_fn):
    return prepared().build(MEMBER, functions(model_fn), Group(), SAMPLE)._model


def custom():
    """Initialise in all the ways that there are, also out of the order of the layers."""
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
    for layer in model[0], model[2]:
        nn.init.trunc_normal_(layer.weight, std=0.1)
        nn.init.constant_(layer.bias, random.random())
    nn.init.orthogonal_(model[0].weight)
    with torch.no_grad():
        model[2].weight[0].mul_(2)
        model[4].weight.copy_(torch.from_numpy(np.random.normal(size=(2, 9))))
        model[4].bias.data = torch.tensor([rate.item() for rate in torch.linspace(0, 0.5, 2)])
    return model


def copied():
    """Copies of a layer, as in ``nn.TransformerEncoder``, of another type."""
    block = nn.Linear(6, 6)
    return nn.Sequential(*(copy.deepcopy(block) for _ in range(4)), nn.Linear(6, 2)).double().float()


def derived():
    """Weights that are computed from those of layers far before."""
    layers = [nn.Linear(6, 6) for _ in range(8)]
    with torch.no_grad():
        layers[7].weight.copy_(2 * layers[0].weight.t() + 1)
        layers[6].bias.copy_(layers[1].weight.sum(0))
        layers[1].weight.zero_()
        torch._foreach_copy_([layers[5].bias], [layers[2].bias])
        layers[2].bias.zero_()
    return nn.Sequential(*layers)


def seeded():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))


def lazy():
    return nn.Sequential(nn.LazyLinear(7), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(2))


def normalised():
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    return nn.Sequential(spectral, nn.MultiheadAttention(6, 2).out_proj, nn.Linear(6, 2))


@pytest.mark.parametrize(
    "model_fn", [custom, copied, derived, seeded, lazy, normalised], ids=lambda one: one.__name__
)
def test_layers_alone_begin_with_the_bits_of_the_whole_network(model_fn):
    expected = whole(model_fn)
    drawn = torch.rand(1)
    cut = chain(model_fn)
    for first in range(len(cut.layers)):
        for last in range(first, len(cut.layers)):
            stage = cut.build(range(first, last + 1), SAMPLE)
            modules = expected[first : last + 1]
            for got, wanted in (
                (stage.weights(), modules.parameters()),
                (stage.statistics(), modules.buffers()),
            ):
                floating = [one.detach().numpy() for one in wanted if one.is_floating_point()]
                assert list(map(np.ndarray.tobytes, got)) == [one.tobytes() for one in floating]
            assert torch.rand(1) == drawn


def test_nested_sequences_are_one_chain():
    class Residual(nn.Sequential):
        def forward(self, inputs):
            return inputs + super().forward(inputs)

    inner = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU()), Residual(nn.Linear(6, 6)))
    cut = chain(lambda: nn.Sequential(nn.Flatten(), inner, nn.Linear(6, 2)))
    assert cut.layers == ("0-Flatten", "1.0-Linear", "1.1.0-ReLU", "1.2-Residual", "2-Linear")


def tied():
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), last)


def with_hook():
    model = nn.Sequential(nn.Linear(6, 2))
    model[0].weight.register_hook(lambda gradient: gradient)
    return model


def called_around():
    model = nn.Sequential(nn.Linear(6, 2))
    model.register_forward_hook(lambda *_: None)
    return model


def compiled():
    return nn.Sequential(torch.compile(nn.Linear(6, 2), backend="eager"))


@pytest.mark.parametrize(
    ("model_fn", "problem"),
    [
        (lambda: nn.Linear(6, 2), "returned Linear as model instead of torch.nn.Sequential for m"),
        (tied, "weights that layers 0-Linear and 2-Linear share for m"),
        (with_hook, "returned parameters with hooks for m"),
        (called_around, "returned Sequential as model, which has hooks"),
        (
            lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 2))),
            "returned one layer alone, 0.0-Linear, for m",
        ),
        (compiled, "returned a compiled module for m"),
    ],
)
def test_networks_that_cannot_be_cut_are_refused_by_name(model_fn, problem):
    with pytest.raises(BadInputError, match=problem):
        chain(model_fn)


@pytest.mark.parametrize("part", ["loss_scale", "scheduler", "optimizer"])
def test_parts_that_no_stage_can_use_are_refused(part):
    model = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parts = {
        "loss_scale": torch.amp.GradScaler("cpu"),
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        # It computes the loss repeatedly.
        "optimizer": torch.optim.LBFGS(model.parameters()),
    }
    with pytest.raises(BadInputError, match=f"{part}.*, which .* it cannot be cut into stages"):
        chain(lambda: model, **({"optimizer": optimizer} | {part: parts[part]}))


def test_a_layer_that_returns_several_tensors_ends_no_stage():
    class Outputs(nn.Module):
        def forward(self, both):
            return both[0]

    cut = chain(lambda: nn.Sequential(nn.LSTM(6, 6), Outputs(), nn.Linear(6, 2)))
    stage = cut.build(range(2), SAMPLE)
    assert stage.forward(1, stage.version(), SAMPLE[0]).shape == (1, 6)
    stage = cut.build(range(1), SAMPLE)
    with pytest.raises(BadInputError, match="layer 0-LSTM returns tuple"):
        stage.forward(1, stage.version(), SAMPLE[0])


class LiveBytes(TorchDispatchMode):
    """Count of the bytes of all tensors that exist at a time."""

    def __init__(self):
        super().__init__()
        self.storages, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, results)):
            if isinstance(tensor, torch.Tensor):
                self.storages[tensor.untyped_storage()._cdata] = weakref.ref(tensor.untyped_storage())
        alive = (storage() for storage in self.storages.values())
        self.most = max(self.most, sum(storage.nbytes() for storage in alive if storage is not None))
        return results


def wide(initialise):
    def model_fn():
        model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(30)))
        for layer in model:
            initialise(layer.weight)
        return model

    return model_fn


@pytest.mark.parametrize("initialise", [nn.init.xavier_normal_, nn.init.kaiming_uniform_])
def test_other_layers_have_no_memory_beyond_the_last_used(initialise):
    layer_bytes = 4 * 100 * 101
    with LiveBytes() as everything:
        expected = whole(wide(initialise))
    assert everything.most >= 30 * layer_bytes
    del expected
    with LiveBytes() as none:
        cut = chain(wide(initialise))
    assert none.most <= 4 * layer_bytes
    with LiveBytes() as some:
        stage = cut.build(range(4, 9), SAMPLE)
    # One copy of a stage's weights is that of the last wave.
    assert some.most <= (5 + 5 + 4) * layer_bytes
    assert sum(weights.nbytes for weights in stage.weights()) == 5 * layer_bytes


GENERATOR = np.random.default_rng(1)
X, Y = GENERATOR.normal(size=(30, 4)), GENERATOR.normal(size=(30, 2))


class WeightedLoss(nn.Module):
    """A loss with weights of its own, which are trained with those of the network."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))

    def forward(self, outputs, targets):
        return ((outputs - targets).square() * self.weight.exp() - self.weight).mean()


def layers():
    return nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
    )


def grouped():
    """Two groups of named parameters, of which layers without weights have none."""
    model, loss = layers(), WeightedLoss()
    named = [*model.named_parameters(), *loss.named_parameters("loss")]
    groups = [
        {"params": [one for one in named if "bias" in one[0]], "weight_decay": 0.0, "lr": 0.02},
        {"params": [one for one in named if "bias" not in one[0]]},
    ]
    optimizer = torch.optim.AdamW(groups, 0.01, weight_decay=0.1, foreach=True)
    scheduler = lr_scheduler.OneCycleLR(optimizer, [0.02, 0.04], total_steps=9)
    return {"model": model, "optimizer": optimizer, "loss": loss, "scheduler": scheduler}


def with_state_from_the_start():
    model = layers()
    model[0].weight.requires_grad_(False)
    return {"model": model, "optimizer": torch.optim.Adagrad(model.parameters(), 0.1), "loss": nn.MSELoss()}


def batches(epoch):
    loader = ArrayLoader(ArraySource(X, Y, "training"), Stream(len(X), 8, 5))
    return Batches(loader, epoch, 0, Group(), lambda: False)


@pytest.mark.parametrize("model_fn", [grouped, with_state_from_the_start], ids=lambda one: one.__name__)
def test_a_stage_has_its_part_of_the_optimizer_and_the_loss(model_fn):
    whole = prepared().build(MEMBER, returning(model_fn), Group(), (X[:1], Y[:1]))
    losses = [whole.train(batches(epoch)) for epoch in (1, 2)]
    chain = prepared().chain(MEMBER, returning(model_fn))
    stages = [chain.build(cut, (X[:1], Y[:1])) for cut in (range(1), range(1, 2), range(2, 4), range(4, 5))]
    for epoch, expected in zip((1, 2), losses, strict=True):
        total = 0.0
        for minibatch, (x, y) in enumerate(batches(epoch)):
            passed, versions = x, [stage.version() for stage in stages]
            for stage, version in zip(stages[:-1], versions, strict=False):
                passed = stage.forward(minibatch, version, passed)
            loss, gradient = stages[-1].forward_backward(minibatch, versions[-1], passed, y)
            for stage in stages[-2::-1]:
                gradient = stage.backward(minibatch, gradient)
            for stage in stages:
                stage.update(minibatch)
            total += loss * len(x)
        for stage in stages:
            stage.end_epoch()
            stage.restore(stage.save())
        assert total / len(X) == pytest.approx(expected, rel=1e-6)
    holders = [whole._model, whole._parts.loss]
    trained = [one for holder in holders for one in holder.parameters() if one.requires_grad]
    got = [weights for stage in stages for weights in stage.weights()]
    assert [one.tobytes() for one in got] == [one.detach().numpy().tobytes() for one in trained]


def test_weights_are_copied_only_while_a_version_is_in_use():
    stage = prepared().chain(MEMBER, returning(grouped)).build(range(5), (X[:1], Y[:1]))
    weight = stage._parts.model[0].weight
    places = [weight.data_ptr()]
    for minibatch in range(2):
        stage.forward_backward(minibatch, stage.version(), X[:8], Y[:8])
        stage.update(minibatch)
        places.append(weight.data_ptr())
    held = stage.version()
    stage.forward_backward(2, held, X[:8], Y[:8])
    stage.update(2)
    assert places == [places[0]] * 3
    assert weight.data_ptr() != places[0]
    assert held["layers.0.weight"].data_ptr() == places[0]


def test_a_stage_holds_its_received_input_only_once():
    chain = prepared().chain(MEMBER, returning(grouped))
    stage = chain.build(range(1, 3), (X[:1], Y[:1]))
    received = np.array(X[:8, [0, 1, 2, 3, 0, 1]], np.float32)
    array = weakref.ref(received)
    stage.forward(1, stage.version(), received)
    values = received.copy()
    del received
    assert array() is None
    # The layer that works in place changes the stage's own copy, and the gradient is that of the input.
    gradient = stage.backward(1, np.ones((8, 6), np.float32))
    weights = stage._parts.model[1].weight.detach().numpy()
    np.testing.assert_allclose(gradient, weights.sum(0) * (values > 0), rtol=1e-5)
