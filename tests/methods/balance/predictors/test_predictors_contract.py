"""Properties of every predictor, those of the replays too."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replays.speed_predictors import PREDICTORS

from hetctl.methods.balance.predictors import learner, network_training
from hetctl.methods.balance.predictors.learner import Learner

pytestmark = pytest.mark.parametrize("name", PREDICTORS)
WORKERS = 3


@pytest.fixture(autouse=True, scope="module")
def _soon():
    """Networks learn and predict after few iterations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "LEARNS_FROM", 8)
        patch.setattr(learner, "PREDICTS_FROM", 16)
        patch.setattr(network_training, "MOST_STEPS", 2)
        yield


def made(name, seed=0):
    return PREDICTORS[name](WORKERS, seed)


def ran(predictor, speeds, cpu, memory):
    for observation in zip(speeds, cpu, memory, strict=True):
        predictor.observe(*observation)
        if isinstance(predictor, Learner):
            predictor.train()
    return predictor.predict()


def noisy(iterations, seed):
    draw = np.random.default_rng(seed)
    cpu, memory = draw.uniform(0.1, 1.0, (2, iterations, WORKERS))
    return 50 * cpu * draw.lognormal(0.0, 0.1, cpu.shape), cpu, memory


def test_before_anything_is_seen_workers_are_alike(name):
    assert made(name).predict().tolist() == [1.0] * WORKERS


def test_after_one_observation_the_last_speed_is_predicted(name):
    predicted = ran(made(name), [np.array([3.0, 4.0, 5.0])], np.ones((1, WORKERS)), np.zeros((1, WORKERS)))
    assert predicted == pytest.approx([3.0, 4.0, 5.0])


def test_a_constant_speed_is_predicted(name):
    speeds = np.tile([10.0, 20.0, 40.0], (40, 1))
    assert ran(made(name), speeds, np.ones_like(speeds), np.zeros_like(speeds)) == pytest.approx(speeds[0])


@settings(max_examples=10, deadline=None)
@given(
    speeds=st.lists(st.tuples(*[st.floats(1e-6, 1e6)] * WORKERS), min_size=1, max_size=30),
    seed=st.integers(0, 9),
)
def test_a_prediction_stays_within_the_speeds_seen(name, speeds, seed):
    values = np.array(speeds)
    _, cpu, memory = noisy(len(values), seed)
    predicted = ran(made(name, seed), values, cpu, memory)
    assert predicted.shape == (WORKERS,)
    assert (predicted >= values.min(axis=0) * (1 - 1e-9)).all()
    assert (predicted <= values.max(axis=0) * (1 + 1e-9)).all()


def test_the_same_seed_gives_the_same_predictions(name):
    first, second = (ran(made(name, 3), *noisy(40, 1)) for _ in range(2))
    assert first.tolist() == second.tolist()


def test_units_of_speed_do_not_matter(name):
    speeds, cpu, memory = noisy(40, 2)
    plain = ran(made(name), speeds, cpu, memory)
    assert ran(made(name), 1000 * speeds, cpu, memory) == pytest.approx(1000 * plain, rel=1e-4)


def test_changing_inputs_or_results_does_not_change_a_predictor(name):
    predictor, speeds = made(name), np.array([3.0, 4.0, 5.0])
    predictor.observe(speeds, np.ones(WORKERS), np.zeros(WORKERS))
    speeds[:] = 7.0
    predictor.predict()[:] = 9.0
    assert predictor.predict() == pytest.approx([3.0, 4.0, 5.0])
