"""Importance of hyper-parameters, of trials whose losses depend on one of them."""

from __future__ import annotations

import random

from hetctl.methods.automl.optuna_study import LEAST_TRIALS, key_importance
from hetctl.methods.automl.trials import Categorical, NumberRange

RATE, UNITS = NumberRange(1e-4, 1.0, log=True), Categorical((1, 2, 4))
KIND = Categorical(("a", "b", None, 4))
SPACE = {"kind": KIND, "units": UNITS, "rate": RATE}


def trials(count, loss_of):
    rng = random.Random(1)
    configs = [
        {
            "rate": 10 ** rng.uniform(-4, 0),
            "units": rng.choice([1, 2, 4]),
            "kind": rng.choice(KIND.values),
        }
        for _ in range(count)
    ]
    return [(config, loss_of(config)) for config in configs]


def test_the_key_that_decides_comes_first():
    found = key_importance(trials(64, lambda config: abs(config["rate"] - 0.01)), SPACE)
    assert next(iter(found)) == "rate"
    assert found["rate"] > 0.7
    assert abs(sum(found.values()) - 1) < 1e-9


def test_a_choice_can_decide():
    found = key_importance(trials(64, lambda config: config["kind"] != "b"), {"rate": RATE, "kind": KIND})
    assert list(found) == ["kind", "rate"]


def test_few_trials_say_nothing():
    few = trials(LEAST_TRIALS - 1, lambda config: config["rate"])
    assert key_importance(few, {"rate": RATE}) == {}
    assert key_importance(trials(20, lambda config: config["rate"]), {}) == {}
