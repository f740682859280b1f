"""Studies that Optuna opens, with the trials of any method."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.methods.automl.optuna_study import COMPLETE, FAIL, PRUNED, RUNNING, StudyTrial, update_study
from hetctl.methods.automl.search_run import study_space
from hetctl.methods.automl.trials import Categorical, NumberRange
from hetctl.model.searches import SearchSpec

optuna = pytest.importorskip("optuna")
SPACE = {
    "lr": NumberRange(0.001, 0.1, log=True),
    "width": Categorical((16, 32)),
    "depth": NumberRange(1, 4, whole=True),
}
FIRST = {"lr": 0.01, "width": 16, "depth": 2, "fixed": 7}
TRIALS = [
    StudyTrial(FIRST, {1: [0.9], 2: [0.5]}, COMPLETE, {"member": "t-0"}),
    StudyTrial({"lr": 0.02, "width": 32, "depth": 1}, {1: [0.8]}, PRUNED),
    StudyTrial({"lr": 0.1, "width": 32, "depth": 4}, {}, FAIL),
    StudyTrial({"lr": 0.05, "width": 32, "depth": 3}, {1: [0.7]}, RUNNING),
]


@pytest.fixture
def storage(tmp_path):
    return f"sqlite:///{tmp_path}/trials.db"


def test_trials_keep_values_states_and_configs(storage):
    update_study(storage, "run-001", ["max"], SPACE, TRIALS)
    study = optuna.load_study(study_name="run-001", storage=storage)
    assert study.direction.name == "MAXIMIZE"
    assert [trial.state.name for trial in study.trials] == [COMPLETE, PRUNED, FAIL, RUNNING]
    assert [trial.intermediate_values for trial in study.trials] == [trial.over_epochs for trial in TRIALS]
    assert [trial.params["lr"] for trial in study.trials] == [0.01, 0.02, 0.1, 0.05]
    assert study.trials[0].user_attrs == {"fixed": 7, "member": "t-0"}
    assert (study.best_value, study.best_params["width"]) == (0.5, 16)


def test_a_study_gets_what_is_new(storage):
    early = [replace(TRIALS[0], values={1: [0.9]}, state=RUNNING), TRIALS[2]]
    update_study(storage, "run-001", ["max"], SPACE, early)
    for _ in range(2):
        update_study(storage, "run-001", ["max"], SPACE, TRIALS)
    study = optuna.load_study(study_name="run-001", storage=storage)
    assert [trial.state.name for trial in study.trials] == [COMPLETE, FAIL, FAIL, RUNNING]
    assert study.trials[0].intermediate_values == {1: 0.9, 2: 0.5}
    assert (study.trials[0].value, study.best_trial.number) == (0.5, 0)
    assert optuna.get_all_study_names(storage) == ["run-001"]


def test_a_study_has_all_metrics_of_a_search_with_several(storage):
    early = StudyTrial(FIRST, {1: [0.9, 3.0]}, RUNNING)
    ended = StudyTrial(FIRST, {1: [0.9, 3.0], 2: [0.5, 2.0]}, COMPLETE)
    other = StudyTrial({"lr": 0.02, "width": 32, "depth": 1}, {1: [0.4, 1.0]}, COMPLETE)
    for trials in ([early], [ended, other, replace(other, values={1: [0.3, 4.0]}, state=PRUNED)]):
        update_study(storage, "run-001", ["max", "min"], SPACE, trials)
    study = optuna.load_study(study_name="run-001", storage=storage)
    assert [direction.name for direction in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert [trial.values for trial in study.trials] == [[0.5, 2.0], [0.4, 1.0], None]
    assert study.trials[0].intermediate_values == {1: 0.9, 2: 0.5}
    assert [trial.number for trial in study.best_trials] == [0, 1]


def test_values_between_those_that_pbt_changes_fit_the_space():
    search = SearchSpec(
        *("pbt", ("a", "b"), {"width": {"choice": [16, 32]}, "kind": {"choice": ["x", "y"]}}, 4),
        settings={"trials": 2, "mutate": {"width": {"multiply": [0.8, 1.2]}}},
    )
    space = study_space(search)
    assert space == {"width": NumberRange(16, 32, whole=True), "kind": Categorical(("x", "y"))}
