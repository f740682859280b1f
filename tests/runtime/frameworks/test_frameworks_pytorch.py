"""PyTorch: results of ``model_fn``, saved and restored state, averages of gradients."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
import torch
from tiny_networks import run_ranks, seed_all
from torch import nn
from torch.optim import lr_scheduler

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import load_framework, pytorch
from hetctl.runtime.frameworks.torch_state import pack, unpack
from hetctl.runtime.worker.group import SingleRank
from hetctl.runtime.worker.user_functions import UserFunctions

pytestmark = pytest.mark.training
SAMPLES = 70
GENERATOR = np.random.default_rng(1)
X, Y = GENERATOR.normal(size=(SAMPLES, 4)), GENERATOR.normal(size=(SAMPLES, 2))


def parts(model=None, optimizer=torch.optim.SGD, scheduler=None, **more):
    model = model or nn.Linear(4, 2)
    rule = optimizer(model.parameters(), lr=0.01)
    timing = {} if scheduler is None else {"scheduler": scheduler(rule)}
    return {"model": model, "optimizer": rule, "loss": nn.MSELoss(), **timing, **more}


def built(model_fn=parts, train_fn=None):
    seed_all("pytorch", 3)
    functions = UserFunctions(lambda _: None, lambda _: model_fn(), train_fn)
    return load_framework("pytorch").build(Member("m", {}), functions, SingleRank(), (X[:8], Y[:8]))


def train(network, epochs=1, samples=SAMPLES, batch=16, start=0, should_stop=lambda: False):
    loader = ArrayLoader(ArraySource(X[:samples], Y[:samples], "training"), Stream(samples, batch, 5))
    for epoch in range(1, epochs + 1):
        network.train(Batches(loader, epoch, start, SingleRank(), should_stop))


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
        (lambda: parts(metrics=[len]), "list as metrics instead of a mapping of names to functions"),
        (lambda: parts(metrics={"error": 3}), "no function as metric error"),
        (lambda: parts(metrics={"loss": len}), "a metric named loss"),
        (lambda: parts(scheduler=lr_scheduler.ReduceLROnPlateau), "a scheduler that waits for a metric"),
        (lambda: parts(scheduler=lambda _: other_scheduler()), "a scheduler of another optimizer"),
    ],
)
def test_the_result_of_model_fn_is_checked(returned, problem):
    with pytest.raises(BadInputError) as caught:
        built(returned)
    assert caught.value.message.startswith(f"model_fn returned {problem}")
    assert caught.value.message.endswith("for m")
    assert '{"model": module, "optimizer": optimizer, "loss": function}' in caught.value.hint


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


AVERAGED = """
import copy, json, sys
import torch
import torch.distributed as dist
from torch import nn
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.frameworks.torch_ranks import Averaging, average, make_equal
from hetctl.runtime.worker.group import join_group
from ranks import place_in

place, announce = place_in(json.loads(sys.argv[1])[0], 3)
group = join_group(place, load_framework("pytorch"), announce)
first, last = [(0, 7), (7, 9), (9, 9)][group.rank]
torch.manual_seed(0)
x, y = torch.randn(9, 4).clamp(-2, 2), torch.randn(9, 2)
x[0, 0] = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)
        self.hidden, self.out = nn.Linear(4, 6), nn.Linear(6, 2)
        self.unused = nn.Linear(2, 2)
        self.of_row_0, self.of_no_row = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        numbers = (x[:, 0].abs() * 2).long().clamp(max=4)
        result = self.out(torch.tanh(self.hidden(x + self.words(numbers))))
        if (x[:, 0] == 9).all():
            return result * self.of_no_row
        large = x[:, :1] > 2
        return result * torch.where(large, self.of_row_0, 1) if large.any() else result


def share(values):
    return values[first:last] if last > first else torch.full_like(values[:1], 9)


def loss(net, x, y, scale=1.0):
    return scale * nn.functional.mse_loss(net(x), y)


def clipped(net, optimizer, share):
    loss(net, share(x), share(y), 5).backward()
    nn.utils.clip_grad_norm_([*net.hidden.parameters(), *net.out.parameters()], 0.5)
    optimizer.step()


def accumulated(net, optimizer, share):
    loss(net, share(x), share(y)).backward()
    loss(net, share(x.flip(0)), share(y.flip(0)), 0.5).backward()
    optimizer.step()


def by_hand(net, optimizer, share):
    named = [net.hidden.weight, net.out.weight]
    for parameter, gradient in zip(named, torch.autograd.grad(loss(net, share(x), share(y)), named)):
        parameter.grad = gradient
    optimizer.step()


def unfrozen_later(net, optimizer, share):
    net.hidden.requires_grad_(False)
    loss(net, share(x), share(y)).backward()
    optimizer.step()
    optimizer.zero_grad()
    net.hidden.requires_grad_(True)
    loss(net, share(x), share(y)).backward()
    optimizer.step()


results = {}
for way in (clipped, accumulated, by_hand, unfrozen_later):
    alone, net = (Net().double() if way is by_hand else Net() for _ in range(2))
    x, y = (x.double(), y.double()) if way is by_hand else (x.float(), y.float())
    net.load_state_dict(alone.state_dict())
    rule = torch.optim.SGD(alone.parameters(), lr=0.1)
    way(alone, rule, lambda values: values)
    rule = torch.optim.SGD(net.parameters(), lr=0.1)
    averaging = Averaging(rule)
    averaging.weight = (last - first) / 9
    way(net, rule, share)
    pairs = zip(alone.parameters(), net.parameters())
    results[way.__name__] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    results[way.__name__ + " unused"] = net.unused.weight.grad is net.of_no_row.grad is None

mine = [torch.tensor([1.0, group.rank]), torch.tensor([group.rank, 7]), torch.tensor([group.rank > 0, True])]
average(mine[:1], 1 / dist.get_world_size())
make_equal([*mine[1:], wide := torch.full((2, 3), group.rank).T])
results["statistics"] = [values.tolist() for values in (*mine, wide)]
json.dump(results, open(f"{json.loads(sys.argv[1])[0]}/{group.rank}.json", "w"))
group.leave()
"""


def test_gradients_equal_those_of_the_whole_batch(tmp_path):
    """Three ranks with 7, 2 and no samples against one with 9."""
    run_ranks(AVERAGED, 3, tmp_path, str(tmp_path))
    for rank in range(3):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert results.pop("statistics") == [[1.0, 1.0], [0, 7], [False, True], [[0, 0]] * 3]
        assert all(result is True or result < 1e-6 for result in results.values()), results
        assert len(results) == 8
