"""Steps over several batches in users' own loops, against one batch with all samples."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from tiny_networks import seed_all
from torch import nn

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
SAMPLES, CHUNK = 30, 12
GENERATOR = np.random.default_rng(1)
X, Y = GENERATOR.normal(size=(SAMPLES, 4)), GENERATOR.normal(size=(SAMPLES, 2))


def loss(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def clipped(data, model, optimizer, _config):
    for x, y in data:
        optimizer.zero_grad(set_to_none=False)
        loss(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return 0.0


def by_closure(data, model, optimizer, _config):
    for x, y in data:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            found = loss(model, x, y)
            found.backward()
            return found

        assert optimizer.step(closure) > 0
    return 0.0


def by_hand(data, model, optimizer, _config):
    for x, y in data:
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss(model, x, y), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return 0.0


def scaled(data, model, optimizer, _config):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for x, y in data:
        optimizer.zero_grad()
        scaler.scale(loss(model, x, y)).backward()
        if data.ends_step:
            scaler.step(optimizer)
            scaler.update()
    return 0.0


def given_up(data, model, optimizer, _config):
    """Leave the first time in the midst of a step, and train the next time."""
    for x, y in data:
        optimizer.zero_grad()
        loss(model, x, y).backward()
        if not hasattr(model, "was_here"):
            model.was_here = True
            return 0.0
        optimizer.step()
    return 0.0


def network(train_fn, batch, chunk):
    def model_fn(_config):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"model": model, "optimizer": optimizer, "loss": nn.MSELoss(), "scheduler": decay}

    seed_all("pytorch", 3)
    member = Member("m", {}, batch, global_batch_size=chunk)
    functions = UserFunctions(lambda _: None, model_fn, train_fn)
    return member, load_framework("pytorch").build(member, functions, Group(), (X[:1], Y[:1]))


def trained(train_fn, batch, chunk, epochs=2):
    member, built = network(train_fn, batch, chunk)
    loader = ArrayLoader(ArraySource(X, Y, "training"), Stream(SAMPLES, CHUNK, 5))
    for epoch in range(1, epochs + 1):
        batches = Batches(loader, epoch, 0, Group(), lambda: False, most=member.micro_batch_size)
        built.train(batches)
    return built


@pytest.mark.parametrize("train_fn", [None, clipped, by_closure, by_hand, scaled, given_up])
def test_batches_of_a_step_train_as_one(train_fn):
    whole, parts = trained(train_fn, CHUNK, None), trained(train_fn, 5, CHUNK)
    for name, array in whole.save().items():
        if not name.startswith("generators"):
            np.testing.assert_allclose(parts.save()[name], array, rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_scheduler_does_not_warn_of_steps_that_wait():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(None, 5, CHUNK)


def twice(data, model, optimizer, _config):
    for x, y in data:
        loss(model, x, y).backward()
        loss(model, x, y).backward()
        optimizer.step()
    return 0.0


def test_two_backward_passes_for_one_batch_are_refused():
    with pytest.raises(BadInputError, match="two backward passes for one batch"):
        trained(twice, 5, CHUNK)
