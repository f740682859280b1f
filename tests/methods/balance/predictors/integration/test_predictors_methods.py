"""Properties of single predictors."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from hetctl.methods.balance.managers import dump_state, load_state
from hetctl.methods.balance.predictors import learner
from hetctl.methods.balance.predictors.learner import (
    EFFORT,
    LAGS,
    TRAINS_EVERY,
    Ema,
    Learner,
    Memoryless,
    narx,
)
from hetctl.model.errors import BadInputError


@pytest.fixture
def soon(monkeypatch):
    """Networks learn and predict after few iterations."""
    monkeypatch.setattr(learner, "LEARNS_FROM", 60)
    monkeypatch.setattr(learner, "PREDICTS_FROM", 120)


def observe(predictor, *observation):
    """Let a predictor observe, and learn at once."""
    predictor.observe(*observation)
    if isinstance(predictor, Learner):
        predictor.train()


def fed(predictor, speeds, cpu=None, memory=None):
    cpu = np.ones_like(speeds) if cpu is None else cpu
    memory = np.zeros_like(speeds) if memory is None else memory
    for observation in zip(speeds, cpu, memory, strict=True):
        observe(predictor, *observation)
    return predictor


def test_memoryless_is_the_last_speed():
    assert fed(Memoryless(1), np.array([[5.0], [7.0]])).predict().tolist() == [7.0]


def test_ema_weighs_the_latest_with_a_fifth():
    assert fed(Ema(1), np.array([[5.0], [10.0], [20.0]])).predict() == pytest.approx([0.8 * 6.0 + 0.2 * 20.0])


def shared(iterations, workers=2, seed=0):
    """Return speeds that follow the CPU at once, both switching at random between two levels."""
    draw = np.random.default_rng(seed)
    cpu = np.where(draw.random((iterations, workers)) < 0.3, 0.3, 1.0)
    return 80 * cpu * draw.lognormal(0.0, 0.02, cpu.shape), cpu


def rmse(predictor, speeds, cpu, first):
    """Feed the observations before each iteration: its CPU, and the speed of the previous one."""
    wrong = []
    for k in range(1, len(speeds)):
        observe(predictor, speeds[k - 1], cpu[k], np.zeros_like(cpu[k]))
        wrong.append(predictor.predict() - speeds[k])
    return float(np.sqrt(np.mean(np.square(wrong[first:]))))


@pytest.mark.usefixtures("soon")
def test_narx_predicts_changes_from_cpu_better_than_the_average():
    speeds, cpu = shared(220)
    assert rmse(narx(2, 0), speeds, cpu, 130) < 0.3 * rmse(Ema(2), speeds, cpu, 130)


@pytest.mark.usefixtures("soon")
def test_before_enough_iterations_narx_is_the_moving_average():
    speeds, cpu = shared(121)
    own, average = narx(2, 0), Ema(2)
    for k in range(1, 121):
        for predictor in (own, average):
            observe(predictor, speeds[k - 1], cpu[k], np.zeros(2))
        assert np.allclose(own.predict(), average.predict()) == (k < 120)


@pytest.mark.usefixtures("soon")
def test_a_worker_starts_from_the_network_of_another():
    workers = 3 * EFFORT.workers
    speeds, cpu = shared(110, workers)
    predictor = narx(workers, 0)
    first = predictor.models.weights.copy()
    for k in range(1, 110):
        observe(predictor, speeds[k - 1], cpu[k], np.zeros(workers))
        changed = (predictor.models.weights != first).any(axis=1)
        if changed.any():
            break
    assert changed.all()
    waiting = predictor.models.weights[EFFORT.workers :]
    assert (waiting == predictor.models.weights[EFFORT.workers - 1]).all()


@pytest.mark.usefixtures("soon")
def test_a_worker_learns_from_what_others_met():
    speeds, cpu = shared(200)
    speeds[:130, 1] /= cpu[:130, 1]
    cpu[:130, 1] = 1.0
    wrong = {}
    for name, predictor in (("narx", narx(2, 0)), ("memoryless", Memoryless(2))):
        errors = []
        for k in range(1, len(speeds)):
            observe(predictor, speeds[k - 1], cpu[k], np.zeros(2))
            errors.append((predictor.predict() - speeds[k])[1])
        wrong[name] = np.sqrt(np.mean(np.square(errors[129:])))
    assert wrong["narx"] < 0.5 * wrong["memoryless"]


def waiting(iterations, workers=2):
    """Return a predictor of which a training waits, and the observations to go on with."""
    speeds, cpu = shared(iterations + 100, workers)
    predictor = narx(workers, 0)
    observations = zip(speeds, cpu, np.zeros_like(cpu), strict=True)
    for observation in islice(observations, iterations):
        predictor.observe(*observation)
    assert predictor.training is not None
    return predictor, observations


@pytest.mark.usefixtures("soon")
def test_a_waiting_training_does_not_change():
    predictor, later = waiting(60)
    training, found = predictor.training, predictor.training.fitted()
    for observation in later:
        predictor.observe(*observation)
    assert predictor.training is training
    assert (training.fitted() == found).all()
    predictor.adopt(found)
    assert (predictor.models.weights == found).all()


@pytest.mark.usefixtures("soon")
def test_a_training_elsewhere_ends_with_the_same_weights():
    predictor, _ = waiting(60, 3 * EFFORT.workers)
    assert (load_state(dump_state(predictor.training)).fitted() == predictor.training.fitted()).all()


@pytest.mark.usefixtures("soon")
def test_trainings_keep_their_distance():
    predictor, later = waiting(60)
    distance = 0
    predictor.train()
    while predictor.training is None:
        predictor.observe(*next(later))
        distance += 1
    assert distance == TRAINS_EVERY


@pytest.mark.usefixtures("soon")
def test_weights_that_nothing_waits_for_are_refused():
    predictor, _ = waiting(60)
    with pytest.raises(BadInputError, match="no training waits for 6 weights"):
        predictor.adopt(np.zeros((2, 3)))
    found = predictor.training.fitted()
    predictor.adopt(found)
    with pytest.raises(BadInputError, match="no training waits"):
        predictor.adopt(found)


@pytest.mark.usefixtures("soon")
def test_the_moving_average_stands_in_for_a_network_that_errs():
    speeds, cpu = shared(300)
    own, average = (fed(one, speeds[:199], cpu[1:200]) for one in (narx(2, 0), Ema(2)))
    assert own.predict() != pytest.approx(average.predict())
    own.models = replace(own.models, centres=own.models.centres - [3.0, 0.0, 0.0])
    for k in range(200, 300):
        for predictor in (own, average):
            predictor.observe(speeds[k - 1], cpu[k], np.zeros(2))
    assert own.predict() == pytest.approx(average.predict())


def test_narx_uses_cpu_of_the_next_iteration_and_two_before():
    assert LAGS == ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2))
