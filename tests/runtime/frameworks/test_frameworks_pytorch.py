"""PyTorch: results of ``model_fn``, saved and restored state, steps over several batches and ranks."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings

import averaged_gradients
import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny_networks import seed_all
from torch import nn
from torch.optim import lr_scheduler

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import load_framework, pytorch
from hetctl.runtime.frameworks.torch_parts import pack, unpack
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import UserFunctions

pytestmark = pytest.mark.training
MEMBER = Member("m", {})
SAMPLES = 70
GENERATOR = np.random.default_rng(1)
X, Y = GENERATOR.normal(size=(SAMPLES, 4)), GENERATOR.normal(size=(SAMPLES, 2))


def parts(model=None, optimizer=torch.optim.SGD, scheduler=None, **more):
    model = model or nn.Linear(4, 2)
    rule = optimizer(model.parameters(), lr=0.01)
    timing = {} if scheduler is None else {"scheduler": scheduler(rule)}
    return {"model": model, "optimizer": rule, "loss": nn.MSELoss(), **timing, **more}


def built(model_fn=parts, train_fn=None, member=MEMBER):
    seed_all("pytorch", 3)
    functions = UserFunctions(lambda _: None, lambda _: model_fn(), train_fn)
    return load_framework("pytorch").build(member, functions, Group(), (X[:8], Y[:8]))


def train(network, epochs=1, samples=SAMPLES, batch=16, start=0, should_stop=lambda: False, most=None):
    loader = ArrayLoader(ArraySource(X[:samples], Y[:samples], "training"), Stream(samples, batch, 5))
    for epoch in range(1, epochs + 1):
        network.train(Batches(loader, epoch, start, Group(), should_stop, most=most))


def test_a_schedule_of_milestones_goes_on_after_a_restore():
    def made():
        rule = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=1.0)
        later = lr_scheduler.MultiStepLR(rule, [2, 4])
        return rule, lr_scheduler.SequentialLR(rule, [lr_scheduler.LinearLR(rule), later], [5])

    whole_rule, whole = made()
    rule, resumed = made()
    for step in range(9):
        if step == 3:
            state, of_rule = unpack(pack(resumed.state_dict())), unpack(pack(rule.state_dict()))
            rule, resumed = made()
            rule.load_state_dict(of_rule)
            resumed.load_state_dict(state)
        for each_rule, each in ((whole_rule, whole), (rule, resumed)):
            each_rule.step()
            each.step()
        assert rule.param_groups[0]["lr"] == whole_rule.param_groups[0]["lr"]


def other_scheduler():
    return lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=1), 1)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (lambda: nn.Linear(4, 2), "Linear instead of a mapping"),
        (lambda: {"model": nn.Linear(4, 2), "loss": nn.MSELoss()}, "no optimizer"),
        (lambda: parts(loss=None), "no loss"),
        (lambda: parts(metric={}), "the unknown key metric"),
        (lambda: parts(loss="mse"), "str as loss instead of a function of outputs and targets"),
        (lambda: parts(loss_scale=2.0), "float as loss_scale instead of a torch.amp.GradScaler"),
        (lambda: parts(metrics=[len]), "list as metrics instead of a mapping of names to functions"),
        (lambda: parts(metrics={"error": 3}), "no function as metric error"),
        (lambda: parts(metrics={"loss": len}), "a metric named loss"),
        (lambda: parts(scheduler=lambda _: other_scheduler()), "a scheduler of another optimizer"),
    ],
)
def test_the_result_of_model_fn_is_checked(returned, problem):
    with pytest.raises(BadInputError) as caught:
        built(returned)
    assert caught.value.message.startswith(f"model_fn returned {problem}")
    assert caught.value.message.endswith("for m")
    assert '{"model": module, "optimizer": optimizer, "loss": function}' in caught.value.hint


def test_a_loss_scale_without_a_context_is_refused():
    with pytest.raises(BadInputError, match="loss_scale for m, which only a train_fn with a context can use"):
        built(lambda: parts(loss_scale=torch.amp.GradScaler("cpu")), closing_train_fn)


def test_the_result_of_train_fn_is_checked():
    with pytest.raises(BadInputError, match="train_fn returned None"):
        train(built(train_fn=lambda *_: None))


def test_a_framework_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, pytorch.__name__)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BadInputError, match="framework pytorch cannot be imported: import of torch"):
        load_framework("pytorch")


OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True),
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p, lr: torch.optim.Adam(p, torch.tensor(lr), amsgrad=True),
    "nadam": torch.optim.NAdam,
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr, centered=True, momentum=0.5),
    "adagrad": torch.optim.Adagrad,
    "asgd": torch.optim.ASGD,
    "lbfgs": torch.optim.LBFGS,
}
SCHEDULERS = {
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=9, cycle_momentum=False),
    "function": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "one after the other": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


def closing_train_fn(data, model, optimizer, _config):
    """Training loop with closures, which LBFGS needs and all others accept."""
    for x, y in data:

        def loss(x=x, y=y):
            optimizer.zero_grad()
            value = nn.functional.mse_loss(model(x), y)
            value.backward()
            return value

        last = optimizer.step(loss)
    return last.item()


def saved(network):
    """Return a copy of a network's state as it is now."""
    return {name: array.copy() for name, array in network.save().items()}


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [(optimizer, None) for optimizer in OPTIMIZERS] + [("momentum", scheduler) for scheduler in SCHEDULERS],
)
def test_restored_training_continues_bit_for_bit(optimizer, scheduler):
    def model_fn():
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
        return parts(model, OPTIMIZERS[optimizer], SCHEDULERS.get(scheduler))

    whole = built(model_fn, closing_train_fn)
    first = saved(whole)
    train(whole, 2)
    whole.scale_learning_rate(2)
    middle = saved(whole)
    untouched = {name: array.copy() for name, array in middle.items()}
    train(whole, 2)
    other = built(model_fn, closing_train_fn)
    train(other, 1)
    other.restore(middle)
    train(other, 2)
    one, same = whole.save(), other.save()
    assert one.keys() == same.keys()
    assert [name for name in one if not np.array_equal(one[name], same[name])] == []
    assert [name for name in middle if not np.array_equal(middle[name], untouched[name])] == []
    assert not np.array_equal(one["model/0.weight"], first["model/0.weight"])


def test_an_adopted_state_keeps_the_own_learning_rate():
    def with_rate(rate):
        return built(lambda: parts(optimizer=lambda p, lr: torch.optim.SGD(p, rate * lr, momentum=0.9)))

    parent, child = with_rate(10), with_rate(2)
    train(parent, 2)
    parent.scale_learning_rate(4)
    child.adopt(saved(parent))
    own, taken = unpack(parent.save()), unpack(child.save())
    assert torch.equal(taken["model"]["weight"], own["model"]["weight"])
    buffers = [state["optimizer"]["state"][0]["momentum_buffer"] for state in (own, taken)]
    assert torch.equal(*buffers)
    rates = [state["optimizer"]["param_groups"][0]["lr"] for state in (own, taken)]
    assert rates == [0.1, 0.02]
    assert [state["learning_rate_factor"] for state in (own, taken)] == [4.0, 1.0]


def test_state_is_unpacked_as_it_was_packed():
    state = {
        "tensors": {0: torch.arange(6).reshape(2, 3).T, "half": torch.tensor(1.5, dtype=torch.bfloat16)},
        "plain": [None, True, 3, math.inf, "text", (0.1, [], {})],
    }
    again = unpack(pack(state))
    assert again["plain"] == state["plain"]
    assert again["tensors"].keys() == state["tensors"].keys()
    for name, tensor in state["tensors"].items():
        assert torch.equal(tensor, again["tensors"][name])
        assert tensor.dtype == again["tensors"][name].dtype
    assert set(pack(state)) == {"tensors/0", "tensors/half", "structure"}


def test_state_that_cannot_be_saved_is_refused_with_its_path():
    with pytest.raises(BadInputError, match="holds object at model/deep/0"):
        pack({"model": {"deep": [object()]}})


@pytest.mark.parametrize("factor", [1, 4])
def test_a_scheduler_steps_each_epoch_and_its_rate_is_scaled(factor):
    network = built(lambda: parts(scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.5)))
    rates = []
    network._optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    train(network)
    network.scale_learning_rate(factor)
    train(network, 2)
    steps = math.ceil(SAMPLES / 16)
    assert rates == pytest.approx([0.01] * steps + [0.005 * factor] * steps + [0.0025 * factor] * steps)


def test_a_scheduler_that_waits_for_a_metric_gets_it():
    def plateau(optimizer):
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    network = built(lambda: parts(scheduler=plateau))
    other = built(lambda: parts(scheduler=plateau))
    rates = []
    for loss in (1.0, 0.5, 0.6, 0.7, 0.8, 0.9):
        train(network)
        network.end_epoch({"val_loss": loss, "loss": 0.0})
        rates.append(network._optimizer.param_groups[0]["lr"])
        network, other = other, network
        network.restore(other.save())
    assert rates == [0.01, 0.01, 0.01, 0.005, 0.005, 0.0025]


def test_a_scheduler_of_the_wrong_direction_is_refused():
    with pytest.raises(BadInputError, match="has mode max, but its metric val_loss has mode min"):
        built(lambda: parts(scheduler=lambda o: lr_scheduler.ReduceLROnPlateau(o, "max")))


def test_part_of_an_epoch_is_no_step_of_the_scheduler():
    network = built(lambda: parts(scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.5)))
    looks = iter([False, False, True])
    train(network, should_stop=lambda: next(looks))
    assert network._optimizer.param_groups[0]["lr"] == 0.01
    train(network, start=32)
    assert network._optimizer.param_groups[0]["lr"] == 0.005


def test_layers_that_wait_for_their_input_are_built():
    def lazy():
        return parts(nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 2)))

    network = built(lazy)
    before = saved(network)
    train(network)
    other = built(lazy)
    other.restore(network.save())
    weights = [state["model/0.weight"] for state in (before, network.save(), other.save())]
    assert weights[0].shape == (3, 4)
    assert not np.array_equal(weights[0], weights[1])
    assert np.array_equal(weights[1], weights[2])


def in_batches(size):
    return [((X[i : i + size], Y[i : i + size]), len(X[i : i + size])) for i in range(0, len(X), size)]


def test_metrics_are_means_over_all_samples():
    network = built(lambda: parts(metrics={"error": nn.functional.l1_loss}))
    whole = network.evaluate(in_batches(len(X)))
    outputs = network._model(torch.tensor(X, dtype=torch.float32)).detach().numpy()
    assert whole.keys() == {"val_loss", "val_error"}
    assert network.evaluate(in_batches(32)) == pytest.approx(whole, rel=1e-5)
    assert network.evaluate([*in_batches(32), ((X[:1], Y[:1]), 0)]) == pytest.approx(whole, rel=1e-5)
    assert whole["val_error"] == pytest.approx(np.abs(outputs - Y).mean(), rel=1e-5)
    assert whole["val_loss"] == pytest.approx(((outputs - Y) ** 2).mean(), rel=1e-5)


def test_a_single_sample_uses_running_statistics_of_batch_norm():
    norm = nn.BatchNorm1d(3)
    network = built(lambda: parts(nn.Sequential(nn.Linear(4, 3), norm, nn.Linear(3, 2))))
    train(network, samples=32, batch=16)
    gathered = norm.running_mean.clone()
    train(network, samples=1)
    assert torch.equal(norm.running_mean, gathered)
    assert norm.training
    train(network, samples=33, batch=16)
    assert int(norm.num_batches_tracked) == 4


def loss(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def clipped(data, model, optimizer, _config):
    for x, y in data:
        optimizer.zero_grad(set_to_none=False)
        loss(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
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


CHUNK = 12


def trained(train_fn, batch, chunk):
    """Train two epochs of 30 samples, with smaller batches than steps if there is a `chunk`."""
    member = Member("m", {}, batch, global_batch_size=chunk)
    network = built(
        lambda: parts(
            optimizer=lambda p, lr: torch.optim.SGD(p, 10 * lr, momentum=0.9),
            scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.5),
        ),
        train_fn,
        member,
    )
    train(network, 2, samples=30, batch=CHUNK, most=member.micro_batch_size)
    return network


@pytest.mark.parametrize("train_fn", [None, clipped, closing_train_fn, by_hand, scaled, given_up])
def test_batches_of_a_step_train_as_one(train_fn):
    whole, parted = trained(train_fn, CHUNK, None), trained(train_fn, 5, CHUNK)
    for name, array in whole.save().items():
        if not name.startswith("generators"):
            np.testing.assert_allclose(parted.save()[name], array, rtol=1e-5, atol=1e-7, err_msg=name)


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


def test_gradients_equal_those_of_the_whole_batch(tmp_path):
    """Three ranks with 7, 2 and no samples against one with 9."""
    run_ranks(averaged_gradients.compare, 3, tmp_path, tmp_path)
    for rank in range(3):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert results.pop("statistics") == [[1.0, 1.0], [0, 7], [False, True], [[0, 0]] * 3]
        assert all(result is True or result < 1e-6 for result in results.values()), results
        assert len(results) == 12


def test_gradients_are_sent_while_others_are_computed(tmp_path):
    run_ranks(averaged_gradients.overlap, 2, tmp_path, tmp_path)
    for rank in range(2):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert results["equal"]
        # The first pass has to show that each parameter gets its gradient once.
        assert results["sent"] == [0, 4, 4]
        assert "given gradients twice in one backward pass" in results["error"]


@pytest.mark.parametrize("before", [{"mode": False}, {"mode": True}, {"mode": True, "warn_only": True}])
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_member_inherits_the_algorithms_of_the_one_before(monkeypatch, before, deterministic):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(**before)
    try:
        load_framework("pytorch").prepare((0,), None, 3, deterministic=deterministic)
        assert torch.get_deterministic_debug_mode() == (2 if deterministic else 0)
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
