"""The networks: their derivatives, and their training."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replays.lstm import Lstm
from replays.rnn import SimpleRnn

from hetctl.methods.balance.predictors.network_training import (
    MOST_STEPS,
    PATIENCE,
    FeedForward,
    Fitting,
    split,
)

FEATURES = 3
NETWORKS = {"narx": FeedForward(FEATURES, 4), "rnn": SimpleRnn(4), "lstm": Lstm(3)}
both = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)


@both
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000))
def test_derivatives_equal_finite_differences(network, seed):
    draw = np.random.default_rng(seed)
    weights = draw.normal(0.0, 0.8, (2, network.parameters))
    inputs = draw.normal(0.0, 1.0, (2, 5, FEATURES))
    outputs, derivatives = network.jacobian(weights, inputs)
    assert outputs == pytest.approx(network.outputs(weights, inputs))
    step = 1e-5
    for at in range(network.parameters):
        moved = np.zeros_like(weights)
        moved[:, at] = step
        up, down = (network.outputs(weights + sign * moved, inputs) for sign in (1, -1))
        assert derivatives[..., at] == pytest.approx((up - down) / (2 * step), rel=1e-7, abs=1e-8)


@both
def test_workers_do_not_touch_one_another(network):
    draw = np.random.default_rng(0)
    weights, inputs = draw.normal(0.0, 1.0, (3, network.parameters)), draw.normal(0.0, 1.0, (3, 6, FEATURES))
    together, derivatives = network.jacobian(weights, inputs)
    for worker in range(3):
        own = slice(worker, worker + 1)
        alone = network.jacobian(weights[own], inputs[own])
        assert together[own] == pytest.approx(alone[0])
        assert derivatives[own] == pytest.approx(alone[1])


@both
def test_training_finds_a_function_of_its_own_kind(network):
    draw = np.random.default_rng(1)
    truth = draw.normal(0.0, 1.0, (2, network.parameters))
    inputs = draw.normal(0.0, 1.0, (2, 300, FEATURES))
    targets = network.outputs(truth, inputs)
    fitting = Fitting(network, np.tile(draw.normal(0.0, 0.3, network.parameters), (2, 1)), inputs, targets)
    while not fitting.done:
        fitting.step()
    left = ((network.outputs(fitting.best, inputs) - targets) ** 2).mean(axis=1)
    assert (left < 0.1 * targets.var(axis=1)).all()


def fitted(targets, seed=0):
    draw = np.random.default_rng(seed)
    network = NETWORKS["narx"]
    inputs = draw.normal(0.0, 1.0, (1, targets.shape[1], FEATURES))
    return Fitting(network, draw.normal(0.0, 0.3, (1, network.parameters)), inputs, targets)


def test_training_on_noise_stops_early():
    fitting = fitted(np.random.default_rng(5).normal(0.0, 1.0, (1, 60)))
    steps = 0
    while not fitting.done:
        fitting.step()
        steps += 1
    assert PATIENCE <= steps < MOST_STEPS


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_held_out_error_of_kept_weights_never_exceeds_the_first(seed):
    fitting = fitted(np.random.default_rng(seed).normal(0.0, 1.0, (1, 50)), seed)
    least = [float(fitting.least[0])]
    for _ in range(5):
        fitting.step()
        least.append(float(fitting.least[0]))
    assert least == sorted(least, reverse=True)


def test_split_cuts_weights_into_arrays():
    first, second = split(np.arange(12.0).reshape(2, 6), [(2, 2), (1, 2)])
    assert first.tolist() == [[[0, 1], [2, 3]], [[6, 7], [8, 9]]]
    assert second.tolist() == [[[4, 5]], [[10, 11]]]
