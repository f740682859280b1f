from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from hetctl.methods.automl.optuna_search import OptunaSource, Pruned
from hetctl.methods.automl.pbt import Mutation, Pbt
from hetctl.methods.automl.procedure import GridSource, OneShot, Procedure, RandomSource
from hetctl.methods.automl.trials import Categorical, NumberRange, Report
from hetctl.model.errors import BadInputError

SPACE = {
    "x": NumberRange(-10.0, 10.0),
    "layers": NumberRange(1, 9, whole=True),
    "kind": Categorical(("a", "b")),
}


def test_without_optuna_its_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(BadInputError, match="not installed") as caught:
        OptunaSource(SPACE)
    assert "pip install optuna" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoSampler", "sampler NoSampler is not a class of optuna.samplers"),
        ("GridSampler", "sampler GridSampler cannot be used: .*search_space"),
    ],
)
def test_a_sampler_that_cannot_be_made_is_refused(name: str, words: str) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(BadInputError, match=words):
        OptunaSource(SPACE, name)


def test_a_sampler_gets_its_options() -> None:
    pytest.importorskip("optuna")
    source = OptunaSource(SPACE, "TPESampler", options={"n_startup_trials": 77})
    assert source.new_study().sampler._n_startup_trials == 77


def search(procedure: Procedure) -> float:
    while new := procedure.ask(1):
        x, layers = new[0].config["x"], new[0].config["layers"]
        procedure.tell(Report(new[0].number, new[0].epochs, (x - 3) ** 2 + (layers - 4) ** 2))
    return min(e.loss for e in procedure.history.events if isinstance(e, Report) and e.loss is not None)


def test_it_learns_from_reports() -> None:
    pytest.importorskip("optuna")
    seeds = range(3)
    learned = [search(Procedure(OneShot(40, 1), OptunaSource(SPACE, seed=seed))) for seed in seeds]
    drawn = [search(Procedure(OneShot(40, 1), RandomSource(SPACE, seed=seed))) for seed in seeds]
    assert sum(learned) < sum(drawn)


CONDITIONAL = {
    "kind": Categorical(("a", "b")),
    "x": NumberRange(-10.0, 10.0),
    "layers": NumberRange(2, 10, whole=True, step=4),
    "depth": NumberRange(1.0, 2.0, when={"kind": ("b",)}),
}


@pytest.mark.parametrize("sampler", ["TPESampler", "RandomSampler"])
def test_optuna_begins_with_given_configs_and_heeds_conditions(sampler: str) -> None:
    pytest.importorskip("optuna")
    start = ({"kind": "b", "x": 3.0, "layers": 6, "depth": 1.5}, {"kind": "a", "x": -1.0})
    source = OptunaSource(CONDITIONAL, sampler, 5, start=start)
    procedure = Procedure(OneShot(30, 1), source)
    search(procedure)
    first, second, *others = [trial.config for trial in procedure.history.trials]
    assert first == start[0]
    assert {**second, **start[1]} == second
    for config in (second, *others):
        assert ("depth" in config) == (config["kind"] == "b")
        assert config["layers"] in (2, 6, 10)
    assert {config["kind"] for config in others} == {"a", "b"}
    # A restored search draws the same again.
    assert Procedure(OneShot(30, 1), source, procedure.history.events).done


def test_a_study_belongs_to_one_search() -> None:
    pytest.importorskip("optuna")
    source = OptunaSource(SPACE, seed=1)
    first, second = Procedure(OneShot(5, 1), source), Procedure(OneShot(5, 1), source)
    assert first.ask() == second.ask()


def test_a_population_may_begin_with_its_draws() -> None:
    pytest.importorskip("optuna")
    method = Pbt(4, 3, 2, {"x": Mutation((0.8, 1.2), -10, 10, multiply=True)})
    procedure = Procedure(method, OptunaSource(SPACE))
    while new := procedure.ask():
        for trial in new:
            procedure.tell(Report(trial.number, trial.epochs, abs(trial.config["x"])))
    assert procedure.done
    assert Procedure(method, OptunaSource(SPACE), procedure.history.events).done


def test_a_state_whose_draws_are_not_optunas_is_refused() -> None:
    pytest.importorskip("optuna")
    procedure = Procedure(OneShot(2, 1), OptunaSource(SPACE))
    (trial,) = procedure.ask(1)
    events = [replace(trial, config={**trial.config, "x": 0.25})]
    with pytest.raises(BadInputError, match="the saved trial 0") as caught:
        Procedure(OneShot(2, 1), OptunaSource(SPACE), events)
    assert "version of Optuna" in caught.value.hint


def test_other_sources_need_no_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert len(Procedure(OneShot(2, 1), GridSource({"kind": SPACE["kind"]})).ask()) == 2


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("TPESampler", {"n_startup_trials": "ten"}, "TPESampler cannot be used: TypeError"),
        ("GridSampler", {"search_space": [1, 2]}, "GridSampler cannot be used: AttributeError"),
        ("GridSampler", {"search_space": {"kind": ["a"]}}, "x, is not found in the given grid"),
        ("BruteForceSampler", {}, "BruteForceSampler cannot be used: ValueError"),
    ],
)
def test_options_that_fail_at_the_first_draws_are_refused(name, options, words) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(BadInputError, match=words):
        OptunaSource(SPACE, name, options=options)


def test_a_part_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(BadInputError, match=r"CmaEsSampler cannot be used: .*cmaes"):
        OptunaSource({"x": SPACE["x"]}, "CmaEsSampler", options={"n_startup_trials": 1})


def test_options_of_a_wrapped_pruner_must_be_a_mapping() -> None:
    pytest.importorskip("optuna")
    wrapped = {"wrapped_pruner": {"name": "MedianPruner", "options": 5}, "patience": 1}
    with pytest.raises(BadInputError, match="options of pruner MedianPruner are a mapping, got 5"):
        Pruned(3, 9, pruner="PatientPruner", options=wrapped)


@pytest.mark.parametrize(
    ("name", "options"),
    [("BruteForceSampler", {}), ("GridSampler", {"search_space": {"kind": ["a", "b"], "layers": [1, 2, 3]}})],
)
def test_a_sampler_of_all_configurations_ends_with_the_last(name, options) -> None:
    pytest.importorskip("optuna")
    source = OptunaSource(
        {"kind": SPACE["kind"], "layers": NumberRange(1, 3, whole=True)}, name, options=options
    )
    procedure = Procedure(OneShot(6, 1), source)
    while new := procedure.ask(1):
        procedure.tell(Report(new[0].number, 1, float(new[0].number)))
    assert len({tuple(sorted(trial.config.items())) for trial in procedure.history.trials}) == 6
    assert Procedure(OneShot(6, 1), source, procedure.history.events).done
    with pytest.raises(BadInputError, match="takes 7 configurations, but there are only 6"):
        Procedure(OneShot(7, 1), source)
