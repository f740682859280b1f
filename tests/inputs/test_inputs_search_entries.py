"""Searches in ensemble files: members for their trials, and what is refused, with its line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.ensemble import Objective
from hetctl.model.errors import BadInputError
from hetctl.model.searches import NamedPart, SearchBudget, SearchSpec

ASHA = {
    "method": "asha",
    "trials": 9,
    "epochs": 9,
    "eta": 3,
    "space": {"lr": {"log_uniform": [0.001, 0.1]}, "width": {"choice": [16, 32]}},
}


def spaced(width: Any, **more: Any) -> dict[str, Any]:
    """Return a search whose space has a second key of this kind, and more keys."""
    return {**ASHA, "space": {"lr": {"choice": [0.1, 0.01]}, "width": width}, **more}


def ensemble_of(tmp_path, search: Any, **more: Any):
    lines = [
        "name: e",
        "command: train {lr}",
        *(f"{key}: {json.dumps(value)}" for key, value in more.items()),
    ]
    if search is not None:
        lines += ["search:", *(f"  {key}: {json.dumps(value)}" for key, value in search.items())]
    file = tmp_path / "e.yaml"
    file.write_text("\n".join([*lines, ""]))
    return read_ensemble(file)


def test_a_search_has_a_member_for_each_trial(tmp_path):
    ensemble = ensemble_of(tmp_path, {**ASHA, "config": {"depth": 3}, "batch_size": 7, "name": "t"})
    assert ensemble.search == SearchSpec(
        *("asha", tuple(f"t-{n:03d}" for n in range(9)), ASHA["space"], 9, {"trials": 9, "eta": 3})
    )
    assert ensemble.trials == {member.name for member in ensemble.members}
    assert {member.stop.max_epochs for member in ensemble.members} == {9}
    assert [member.stop.expected_epochs for member in ensemble.members] == [9, 3, 3, 1, 1, 1, 1, 1, 1]
    assert all(m.config["depth"] == 3 and m.config["width"] in (16, 32) for m in ensemble.members)
    assert all(0.001 <= m.config["lr"] <= 0.1 and m.batch_size == 7 for m in ensemble.members)
    assert ensemble.search.configs_are_known


def test_trials_begin_as_told_and_heed_the_conditions_of_their_space(tmp_path):
    width = {"integer": [16, 64], "step": 16, "when": {"lr": [0.1]}, "prior": 32}
    search = spaced(width, start=[{"lr": 0.1, "width": 48}, {"lr": 0.01}])
    ensemble = ensemble_of(tmp_path, search)
    assert ensemble.search is not None
    assert ensemble.search.space["width"] == width
    first, second, *others = [member.config for member in ensemble.members]
    assert (first, second) == ({"lr": 0.1, "width": 48}, {"lr": 0.01})
    assert all(("width" in config) == (config["lr"] == 0.1) for config in others)
    assert {config.get("width", 16) for config in others} <= {16, 32, 48, 64}


@pytest.mark.parametrize(
    ("given", "objective"),
    [
        ({}, Objective("val_loss", "min")),
        ({"stop": {"metric": "loss"}}, Objective("loss", "min")),
        ({"metric": "val_f1", "stop": {"metric": "loss"}}, Objective("val_f1", "max")),
        ({"metric": "val_f1", "mode": "min"}, Objective("val_f1", "min")),
    ],
)
def test_trials_are_compared_by_the_metric_of_their_search(given, objective, tmp_path):
    ensemble = ensemble_of(tmp_path, {**ASHA, **given}, members=[{"name": "a", "config": {"lr": 1}}])
    assert {ensemble.member(name).objective for name in ensemble.trials} == {objective}
    assert ensemble.member("a").objective == Objective("val_loss", "min")


def test_a_search_goes_beside_members(tmp_path):
    ensemble = ensemble_of(tmp_path, ASHA, members=[{"name": "a", "config": {"lr": 1}}])
    assert [member.name for member in ensemble.members][:2] == ["a", "trial-000"]
    assert "a" not in ensemble.trials


def test_parts_of_optuna_and_a_budget_are_read(tmp_path):
    search = {
        **{"method": "optuna", "trials": 3, "epochs": 4, "every": 2, "space": ASHA["space"], "seed": 5},
        "sampler": {"name": "TPESampler", "options": {"n_startup_trials": 2}},
        "pruner": "MedianPruner",
        "budget": {"time": "2h", "gpu_hours": 1.5, "epochs": 8},
        "parallel": 2,
    }
    found = ensemble_of(tmp_path, search).search
    assert found.sampler == NamedPart("TPESampler", {"n_startup_trials": 2})
    assert found.pruner == NamedPart("MedianPruner")
    assert found.budget == SearchBudget(8, 1.5, 7200)
    assert (found.seed, found.parallel, found.settings) == (5, 2, {"trials": 3, "every": 2})
    assert not found.configs_are_known


CHOICE = {"space": {"lr": {"choice": [0.1, 0.01]}}}
PBT = {"method": "pbt", "trials": 4, "epochs": 6, "every": 2, "space": ASHA["space"]}


@pytest.mark.parametrize(
    ("search", "line", "words"),
    [
        ({**ASHA, "method": "ash"}, 4, "search.method: must be 'grid', 'random'"),
        ({**ASHA, "trials": 0}, 5, "search.trials: must be at least 1, got 0"),
        ({**ASHA, "tirals": 3}, 9, "unknown key 'tirals'; did you mean 'trials'"),
        ({key: ASHA[key] for key in ASHA if key != "trials"}, 3, "trials: is required with method asha"),
        ({**ASHA, "every": 2}, 9, "search.every: does not go with method asha, only with pbt, optuna"),
        ({**ASHA, "min_epochs": 10}, 3, "search: max_epochs is 9, but the first rung has 10"),
        ({**ASHA, "variant": "pausing"}, 9, "search.variant: must be 'delayed', 'promotion' or 'stopping'"),
        ({**ASHA, "space": {}}, 8, "search.space: must have at least 1"),
        ({**ASHA, "space": {"lr": {"uniform": [2, 1]}}}, 8, "must be [lower, upper] with lower < upper"),
        ({**ASHA, "config": {"lr": 1}}, 8, "key 'lr' must be in config or in space, not in both"),
        ({**ASHA, "stop": {"max_epochs": 3}}, 9, "search.stop.max_epochs: does not go with a search"),
        ({**ASHA, "budget": {"time": "2"}}, 9, "search.budget.time: '2' is not a duration"),
        ({**ASHA, "name": "x/y"}, 9, "search.name: must be 1 to 64 of A-Z"),
        ({"method": "grid", "epochs": 2, "space": ASHA["space"]}, 6, "space.lr: must be a choice"),
        ({**PBT, "mutate": {"rl": {"add": [1]}}}, 9, "search.mutate.rl: is no key of space"),
        ({**PBT, "mutate": {"lr": {"add": [1], "multiply": [2]}}}, 9, "exactly one of add, multiply"),
        ({**PBT, "every": 4, "mutate": {"lr": {"multiply": [2]}}}, 3, "but must be a multiple of every, 4"),
        ({"method": "optuna", "trials": 2, "epochs": 2, **CHOICE, "sampler": "No"}, 3, "sampler No is not"),
        ({"method": "optuna", "trials": 2, "epochs": 2, **CHOICE, "every": 2}, 8, "needs a pruner"),
        ({"method": "random", "trials": 10_001, "epochs": 2, **CHOICE}, 3, "must have at most 10,000 trials"),
        ({**ASHA, "mode": "max"}, 9, "search.mode: needs a metric"),
        ({**ASHA, "metric": ""}, 9, "search.metric: must"),
        (spaced({"choice": [1, 2], "step": 2}), 8, "has a step, which only integer may have"),
        (spaced({"when": {"lr": [0.1]}}), 8, "must have exactly one of choice, integer"),
        (
            spaced({"choice": [1, 2], "when": {"lp": [0.1]}}),
            8,
            "is no key of space above width; known: lr",
        ),
        (spaced({"choice": [1, 2], "when": {"lr": [0.2]}}), 8, "is never 0.2"),
        (spaced({"choice": [1, 2], "prior": 3}), 8, "must be one of its values"),
        (spaced({"integer": [1, 9], "step": 4, "prior": 2}), 8, "must be one of its values"),
        (spaced({"integer": [1, 9], "prior": 3}, sampler="TPESampler"), 8, "does not go with a sampler"),
        (spaced({"choice": [1]}, start=[{"lr": 0.2}]), 9, "must be one of the values of its space"),
        (spaced({"choice": [1]}, start=[{"ly": 0.1}]), 9, "is no key of space; known: lr, width"),
        (spaced({"choice": [1]}, start=[{"lr": 0.1}] * 10), 9, "must have at most 9 configs"),
        (
            {"method": "grid", "epochs": 2, "space": CHOICE["space"], "start": [{"lr": 0.1}]},
            7,
            "does not go with method grid",
        ),
        ({**ASHA, "also": {"size": "less"}}, 9, "must be 'max' or 'min'"),
        (
            {**ASHA, "also": {"size": "min"}, "variant": "stopping"},
            9,
            "does not go with the variant stopping",
        ),
        ({**ASHA, "metric": "f", "also": {"f": "min"}}, 10, "is the metric that the search goes by anyway"),
        (None, 1, "members: is required, unless there is a search"),
    ],
)
def test_a_wrong_search_is_refused_with_its_line(search, line, words, tmp_path):
    with pytest.raises(BadInputError) as caught:
        ensemble_of(tmp_path, search)
    assert f"e.yaml:{line}: " in caught.value.message
    assert words in caught.value.message
