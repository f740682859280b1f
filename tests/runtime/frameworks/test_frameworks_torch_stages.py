"""Stages in PyTorch: groups of parameters, losses with weights, and memory of versions."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hetctl.model.ensemble import Member
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import UserFunctions

pytestmark = pytest.mark.training
MEMBER = Member("m", {}, 8)
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


def functions(model_fn):
    return UserFunctions(lambda _: None, lambda _: model_fn(), None)


def prepared():
    framework = load_framework("pytorch")
    framework.prepare((0,), None, 3)
    return framework


def batches(epoch):
    loader = ArrayLoader(ArraySource(X, Y, "training"), Stream(len(X), 8, 5))
    return Batches(loader, epoch, 0, Group(), lambda: False)


@pytest.mark.parametrize("model_fn", [grouped, with_state_from_the_start], ids=lambda one: one.__name__)
def test_a_stage_has_its_part_of_the_optimizer_and_the_loss(model_fn):
    whole = prepared().build(MEMBER, functions(model_fn), Group(), (X[:1], Y[:1]))
    losses = [whole.train(batches(epoch)) for epoch in (1, 2)]
    chain = prepared().chain(MEMBER, functions(model_fn))
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
    stage = prepared().chain(MEMBER, functions(grouped)).build(range(5), (X[:1], Y[:1]))
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
    chain = prepared().chain(MEMBER, functions(grouped))
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
