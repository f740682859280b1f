"""Fused members in PyTorch: each as it would be alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_networks import seed_all
from torch import nn

from hetctl.model.ensemble import Member
from hetctl.runtime.data.batches import Batches, validation_batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import UNSHUFFLED, Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import finished, load_framework, torch_fused
from hetctl.runtime.frameworks.torch_fused import LEAST_GAIN, MOST_PAIRS, Stack, Widths
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import UserFunctions

pytestmark = pytest.mark.training
SAMPLES, BATCH, EPOCHS = 70, 16, 20
GENERATOR = np.random.default_rng(1)
X, Y = GENERATOR.normal(size=(SAMPLES, 4)), GENERATOR.normal(size=(SAMPLES, 2))
FRAMEWORK = load_framework("pytorch")
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
RULES = {
    "sgd": (SGD, [{"lr": 0.1}, {"lr": 0.02, "weight_decay": 0.1}]),
    "momentum": (SGD, [{"lr": 0.05, "momentum": 0.9}, {"lr": 0.01, "momentum": 0.5, "nesterov": True}]),
    "adam": (ADAM, [{"lr": 0.01}, {"lr": 0.003, "betas": (0.8, 0.99), "weight_decay": 0.01, "eps": 1e-6}]),
    "adamw": (ADAMW, [{"lr": 0.01}, {"lr": 0.02, "weight_decay": 0.2}]),
}


@pytest.fixture(autouse=True)
def _in_64_bits():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def model_fn(config):
    dropout = [nn.Dropout(config["dropout"])] if "dropout" in config else []
    norm = [nn.BatchNorm1d(config.get("width", 5))] if config.get("norm") else []
    layers = [nn.Linear(4, config.get("width", 5)), *norm, nn.Tanh(), *dropout]
    model = nn.Sequential(*layers, nn.Linear(config.get("width", 5), 2))
    options = dict(config.get("options", {}))
    # Against the order of the module.
    groups = [{"params": model[-1].parameters()}, {"params": model[:-1].parameters(), "lr": 0.005}]
    rule = config.get("rule", SGD)(
        groups if config.get("groups") else model.parameters(), **{"lr": 0.1, **options}
    )
    more = {"scheduler": torch.optim.lr_scheduler.StepLR(rule, 3, 0.7)} if config.get("schedule") else {}
    model = config.get("wrap", lambda m: m)(model)
    parts = {"model": model, "optimizer": rule, "loss": nn.MSELoss(), **more}
    return {**parts, **config.get("change", lambda _: {})(parts)}


def built(config, number, build):
    member = Member(f"m{number}", config, batch_size=BATCH, seed=number)
    seed_all("pytorch", number)
    return build(member, UserFunctions(lambda _: None, model_fn, None), Group(), (X[:8], Y[:8]))


def loader(number, samples=SAMPLES):
    return ArrayLoader(ArraySource(X[:samples], Y[:samples], "training"), Stream(samples, BATCH, number))


def epochs_of(network, number, first=1, last=EPOCHS):
    """Train in parts; return the metrics of each epoch."""
    held_out = ArrayLoader(ArraySource(X, Y, "validation"), Stream(SAMPLES, 32, UNSHUFFLED))
    found = []
    for epoch in range(first, last + 1):
        loss = yield from network.training(Batches(loader(number), epoch, 0, Group(), lambda: False))
        metrics = yield from network.evaluating(validation_batches(held_out, epoch, lambda: None))
        network.end_epoch(metrics)
        found.append({"loss": loss, **metrics})
    return found


def together(trainings, networks, steps, *, refuses=False):
    """Run trainings as a rank does; return their results by number."""
    for name, network in networks.items():
        steps.join(name, network)
    results, found = {}, {}
    while trainings:
        works = {}
        for name, training in list(trainings.items()):
            try:
                works[name] = training.send(results.get(name))
            except StopIteration as end:
                found[name] = end.value
                del trainings[name]
                steps.leave(name, networks[name])
        results = steps.run(works)
        for result in results.values():
            assert not isinstance(result, Exception), result
        assert refuses or not steps.refused, steps.refused
    return found


class Fixed(Widths):
    def __init__(self, width):
        super().__init__()
        self._width = width

    def next(self, _members):
        return self._width

    def best(self, _members):
        # Then all stay, even each in a stack of its own.
        return None

    def note(self, *_):
        pass


def assert_as_alone(configs, last=EPOCHS, tolerance=1e-12, widths=None):
    networks = {n: built(config, n, FRAMEWORK.build_fused) for n, config in enumerate(configs)}
    steps = FRAMEWORK.fused_steps()
    if widths:
        steps._widths = Fixed(widths)
    found = together({n: epochs_of(net, n, last=last) for n, net in networks.items()}, networks, steps)
    for number, config in enumerate(configs):
        alone = built(config, number, FRAMEWORK.build)
        expected = finished(epochs_of(alone, number, last=last))
        for epoch, other in zip(found[number], expected, strict=True):
            assert epoch == pytest.approx(other, rel=tolerance, abs=tolerance)
        saved, as_alone = networks[number].save(), alone.save()
        assert saved.keys() == as_alone.keys()
        for name, array in saved.items():
            np.testing.assert_allclose(array, as_alone[name], rtol=tolerance, atol=tolerance, err_msg=name)
    return steps


@pytest.mark.parametrize("name", RULES)
def test_members_of_one_stack_train_as_alone(name):
    rule, options = RULES[name]
    configs = [{"rule": rule, "options": options[n % 2], "schedule": n == 2} for n in range(3)]
    assert_as_alone(configs, widths=4)


def test_dropouts_draw_what_they_would_alone():
    assert_as_alone(
        [{"dropout": rate, "rule": ADAM, "options": {"lr": 0.01}} for rate in (0.1, 0.5, 0.0)], widths=4
    )


def test_running_statistics_and_groups_of_parameters_are_those_of_each_member():
    assert_as_alone(
        [{"norm": True, "groups": True}, {"norm": True, "groups": True, "options": {"lr": 0.02}}], widths=2
    )


class Keeping(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        self.outputs = self.inner(x)
        return self.outputs

    def train(self, mode=True):
        super().train(mode)
        # As most do, it returns nothing.
        for each in self.inner:
            if isinstance(each, nn.BatchNorm1d):
                each.eval()


def judged_by(value):
    """Return parts whose values are in a default, an object and a closure."""

    class Above:
        def __init__(self, least):
            self.least = least

        def share(self, outputs, y):
            return (outputs - y > self.least).double().mean()

    def near(outputs, y, limit=value):
        return ((outputs - y).abs() < limit).double().mean()

    loss = nn.HuberLoss(delta=value) if value < 2 else lambda o, y: value * nn.functional.mse_loss(o, y)
    return {"loss": loss, "metrics": {"near": near, "above": Above(value - 1).share}}


def test_losses_and_metrics_are_those_of_each_member_and_modules_may_keep_results():
    changes = [{"wrap": Keeping, "change": lambda _, value=v: judged_by(value)} for v in (1.0, 1.9, 2.0)]
    assert_as_alone([{"options": {"lr": 0.01}, "norm": True, **each} for each in changes], last=4)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 7), st.integers(2, 5), st.sampled_from(sorted(RULES)), st.integers(1, 4))
def test_any_width_is_exact(width, members, name, together_at_most):
    rule, options = RULES[name]
    configs = [{"rule": rule, "options": options[n % 2], "width": width} for n in range(members)]
    assert_as_alone(configs, last=3, widths=together_at_most)


def test_a_member_joins_and_another_leaves_and_no_one_notices():
    """The second begins amid the first one's epochs, and goes on alone; the third leaves before."""
    configs = [{"rule": ADAM, "options": {"lr": 0.01}, "dropout": 0.2} for _ in range(3)]
    networks = {n: built(config, n, FRAMEWORK.build_fused) for n, config in enumerate(configs)}
    steps, lengths = FRAMEWORK.fused_steps(), {0: 4, 1: 6, 2: 2}
    steps._widths = Fixed(4)
    trainings = {n: epochs_of(networks[n], n, last=last) for n, last in lengths.items()}
    late, first = trainings.pop(1), trainings[0]

    def letting_in():
        """Let the second begin after seven steps, so that epochs end at different ones."""
        taken, result = 0, None
        while True:
            try:
                result = yield first.send(result)
            except StopIteration as end:
                return end.value
            taken += 1
            if taken == 7:
                trainings[1] = late

    trainings[0] = letting_in()
    found = together(trainings, networks, steps)
    for number, last in lengths.items():
        alone = built(configs[number], number, FRAMEWORK.build)
        expected = finished(epochs_of(alone, number, last=last))
        for epoch, other in zip(found[number], expected, strict=True):
            assert epoch == pytest.approx(other, rel=1e-12)


def test_a_member_takes_the_row_of_one_that_has_left(monkeypatch):
    """The second ends first; the sixth begins then, and takes its row between others that have gone on."""
    formed = []
    monkeypatch.setattr(
        torch_fused, "Stack", lambda slices, **given: formed.append(given) or Stack(slices, **given)
    )
    configs = [{"rule": ADAM, "options": {"lr": 0.01 * (n + 1)}, "dropout": 0.2} for n in range(6)]
    networks = {n: built(config, n, FRAMEWORK.build_fused) for n, config in enumerate(configs)}
    steps, lengths = FRAMEWORK.fused_steps(), (4, 2, 4, 4, 4, 2)
    steps._widths = Fixed(8)
    trainings = {n: epochs_of(networks[n], n, last=last) for n, last in enumerate(lengths)}
    late, second = trainings.pop(5), trainings[1]

    def followed():
        found = yield from second
        trainings[5] = late
        return found

    trainings[1] = followed()
    found = together(trainings, networks, steps)
    for number, last in enumerate(lengths):
        alone = built(configs[number], number, FRAMEWORK.build)
        for epoch, other in zip(found[number], finished(epochs_of(alone, number, last=last)), strict=True):
            assert epoch == pytest.approx(other, rel=1e-12)
        for name, array in alone.save().items():
            np.testing.assert_allclose(networks[number].save()[name], array, rtol=1e-12, atol=1e-12)
    # But for the trial steps, only one at the beginning; all others end together.
    assert [given for given in formed if not given] == [{}]


@pytest.mark.parametrize("first_fused", [True, False])
def test_a_checkpoint_goes_on_fused_or_not(first_fused):
    config = {"rule": ADAM, "options": {"lr": 0.01}, "dropout": 0.2, "schedule": True}
    whole = built(config, 0, FRAMEWORK.build)
    expected, state = finished(epochs_of(whole, 0, last=6)), whole.save()
    saved = None
    for fused, (first, last) in ((first_fused, (1, 3)), (not first_fused, (4, 6))):
        count = 2 if fused else 1
        networks = {
            n: built(config, n, FRAMEWORK.build_fused if fused else FRAMEWORK.build) for n in range(count)
        }
        if saved is not None:
            networks[0].restore(saved)
        trainings = {n: epochs_of(network, n, first, last) for n, network in networks.items()}
        if fused:
            steps = FRAMEWORK.fused_steps()
            steps._widths = Fixed(2)
            found = together(trainings, networks, steps)[0]
        else:
            found = finished(trainings[0])
        assert [each["loss"] for each in found] == pytest.approx(
            [e["loss"] for e in expected[first - 1 : last]]
        )
        saved = networks[0].save()
    for name, array in state.items():
        np.testing.assert_allclose(saved[name], array, rtol=1e-12, atol=1e-12, err_msg=name)


class Branching(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        outputs = self.inner(x)
        return outputs if outputs.sum() > 0 else -outputs


class Scaling(Branching):
    factor = 1.0

    def forward(self, x):
        return self.inner(x) * type(self).factor


class Noisy(Branching):
    def forward(self, x):
        return nn.functional.dropout(self.inner(x), 0.5)


class Replacing(Scaling):
    def __init__(self, inner):
        super().__init__(inner)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.seen = self.seen + self.training
        return self.inner(x)


class Counting(Branching):
    seen = 0

    def forward(self, x):
        self.seen += 1
        return self.inner(x)


class Drawing(Branching):
    def forward(self, x):
        return self.inner(x) * (1 if np.random.random() < 2 else 0)


class Padded(Branching):
    def __init__(self, inner):
        super().__init__(inner)
        self.words = nn.Embedding(3, 4, padding_idx=0)
        self.words.requires_grad_(False)


def clipped(parts):
    def clip(*_):
        nn.utils.clip_grad_norm_(parts["model"].parameters(), 0.01)

    parts["optimizer"].register_step_pre_hook(clip)
    return {}


def wrapped(parts):
    take, parts["optimizer"].step = parts["optimizer"].step, lambda: take()
    return {}


def decayed(parts):
    def loss(outputs, y):
        squares = sum(each.square().sum() for each in parts["model"].parameters())
        return nn.functional.mse_loss(outputs, y) + 1e-9 * squares

    return {"loss": loss}


def half(model):
    wrapped = Scaling(model)
    wrapped.factor = 0.5
    return wrapped


@pytest.mark.parametrize(
    ("configs", "reason"),
    [
        ([{"wrap": Branching}] * 2, "RuntimeError: vmap"),
        ([{"wrap": Noisy}] * 2, "RuntimeError: vmap"),
        ([{"wrap": Noisy, "dropout": 0.2}] * 2, "RuntimeError: vmap"),
        ([{"wrap": Replacing}] * 2, "TypeError: the module replaces a buffer"),
        ([{"wrap": Keeping, "rule": torch.optim.RMSprop}] * 2, "its optimizer is RMSprop"),
        ([{"wrap": Counting}] * 2, "its module changes its attributes"),
        ([{"wrap": Drawing}] * 2, "draws random numbers of Python or NumPy"),
        ([{"wrap": Padded}] * 2, "its embeddings have a padding_idx"),
        ([{"change": decayed}] * 2, "uses those of its module"),
        ([{"change": clipped}] * 2, "its optimizer's step has hooks"),
        ([{"change": wrapped}] * 2, "its optimizer's step has hooks"),
        ([{}, {"width": 6}], "its modules differ"),
        ([{"wrap": Scaling}, {"wrap": half}], "its modules differ"),
        ([{"rule": torch.optim.RMSprop}] * 2, "its optimizer is RMSprop"),
        ([{"options": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}}] * 2, "its optimizer has options"),
        ([{"rule": ADAM, "options": {"decoupled_weight_decay": True}}] * 2, "its optimizer has options"),
    ],
)
def test_what_cannot_be_fused_is_refused_and_trains_as_alone(configs, reason):
    networks = {n: built(config, n, FRAMEWORK.build_fused) for n, config in enumerate(configs)}
    steps, reasons = FRAMEWORK.fused_steps(), {}

    def noting(number):
        result = None
        training = epochs_of(networks[number], number, last=2)
        while True:
            try:
                result = yield training.send(result)
            except StopIteration as end:
                return end.value
            reasons.update(steps.refused)

    found = together({n: noting(n) for n in networks}, networks, steps, refuses=True)
    assert reason in reasons[1]
    for number, config in enumerate(configs):
        assert found[number] == finished(epochs_of(built(config, number, FRAMEWORK.build), number, last=2))


def test_members_for_whose_stack_there_is_no_memory_train_alone(monkeypatch):
    """The first of two has a row already."""
    networks = {n: built({"rule": ADAM}, n, FRAMEWORK.build_fused) for n in range(2)}
    steps, update = FRAMEWORK.fused_steps(), Stack._updates_of

    def filling(stack, row, optimizer):
        if row:
            raise torch.OutOfMemoryError("no memory")
        return update(stack, row, optimizer)

    monkeypatch.setattr(Stack, "_updates_of", filling)
    trainings = {n: epochs_of(network, n, last=2) for n, network in networks.items()}
    found = together(trainings, networks, steps, refuses=True)
    for number in networks:
        alone = built({"rule": ADAM}, number, FRAMEWORK.build)
        assert found[number] == finished(epochs_of(alone, number, last=2))


def tried(widths, seconds, members=16):
    """Let widths be tried as long as they are; return them in order."""
    found = []
    while widths.best(members) is None:
        found.append(width := widths.next(members))
        widths.note(width, members, members * seconds(width, len(found)))
    return found


def test_the_fastest_width_is_chosen_and_none_that_is_slower_than_alone():
    seconds = {1: 1.0, 2: 0.7, 4: 0.4, 8: 0.5, 16: 0.6}
    for gain, best, pairs in (
        (1.0, 4, [(1, 16), (16, 8), (8, 4), (4, 2)]),
        (2.6, 1, [(1, 16), (1, 8)]),
        (1.8, 8, [(1, 16), (1, 8), (8, 4)]),
    ):
        seconds[4] = 0.4 if gain == 1 else 0.6
        widths = Widths()
        found = tried(widths, lambda width, _n, gain=gain: seconds[width] * (gain if width > 1 else 1), 12)
        assert dict.fromkeys(zip(found[::2], found[1::2], strict=True)) == dict.fromkeys(pairs)
        assert widths.best(12) == best


def test_a_width_counts_as_faster_only_if_most_steps_side_by_side_are():
    """A load comes and goes between steps; then it is the time of both."""
    draw = np.random.default_rng(1)
    chosen = {}
    for gain in (1.0, 1.02, 1.2, 2.0):
        found = []
        for _ in range(200):
            load = np.repeat(draw.choice([1.0, 1.6], 20), 10) * draw.normal(1, 0.05, 200)
            widths = Widths()
            steps = tried(
                widths, lambda width, n, load=load, gain=gain: load[n] / (gain if width > 1 else 1), 2
            )
            assert len(steps) <= 2 * (MOST_PAIRS + 1)
            found.append(widths.best(2) == 2)
            # A plan takes the widths by their rates.
            assert (widths.known[2] > LEAST_GAIN * widths.known[1]) == found[-1]
        chosen[gain] = np.mean(found)
    assert max(chosen[1.0], chosen[1.02]) < 0.05
    assert min(chosen[1.2], chosen[2.0]) > 0.9


def test_no_width_is_tried_that_another_process_has_measured():
    widths, rates = Widths(), {1: 1.0, 16: 3.0, 8: 4.0, 4: 2.0}
    widths.known = {width: rate for width, rate in rates.items() if width != 4}
    found = tried(widths, lambda width, _n: 1 / rates[width])
    assert (widths.best(16), {*found}) == (8, {8, 4})
    widths = Widths()
    widths.known = rates
    assert (widths.best(16), Widths().best(16)) == (8, None)


def test_members_of_a_program_known_to_gain_nothing_take_no_trial_step(monkeypatch):
    monkeypatch.setattr(torch_fused, "different", None)
    networks = {n: built({}, n, FRAMEWORK.build_fused) for n in range(3)}
    steps = FRAMEWORK.fused_steps()
    steps._widths = Widths()
    steps._widths.known = {1: 1.0, 2: 1.0, 4: 1.0}
    found = together({n: epochs_of(networks[n], n) for n in networks}, networks, steps, refuses=True)
    assert found[2] == finished(epochs_of(built({}, 2, FRAMEWORK.build), 2))


def test_rates_are_those_of_steps_after_the_first_ones_but_gains_stay(monkeypatch):
    """Each step takes half a second here; the trial had them a hundred times as fast."""
    seconds = itertools.count(step=0.5)
    monkeypatch.setattr(torch_fused, "_time", lambda: next(seconds))
    monkeypatch.setattr(torch_fused, "STEADY_STEPS", (3,))
    networks = {n: built({}, n, FRAMEWORK.build_fused) for n in range(2)}
    steps = FRAMEWORK.fused_steps()
    steps._widths = Widths()
    steps._widths.known = {1: 100.0, 2: 400.0}
    together({n: epochs_of(networks[n], n, last=2) for n in networks}, networks, steps)
    assert steps._widths.known == pytest.approx({1: 1.0, 2: 4.0})
    assert steps.measured == pytest.approx({1: BATCH, 2: 4 * BATCH})


def test_no_width_is_tried_below_one_that_is_slower():
    widths, seconds = Widths(), {1: 1.0, 16: 0.3, 8: 0.4}
    tried(widths, lambda width, _n: seconds[width])
    assert (widths.best(16), [*widths.known]) == (16, [1, 16, 8])


@pytest.mark.parametrize("name", RULES)
def test_members_that_try_to_be_alone_stay_in_their_stack(name, monkeypatch):
    monkeypatch.setattr(Fixed, "next", lambda *_: next(turns))
    turns = itertools.cycle((2, 1, 1, 2))
    rule, options = RULES[name]
    assert_as_alone([{"rule": rule, "options": options[n]} for n in range(2)], widths=2)
