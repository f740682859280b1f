"""Searches of ensemble files in a run: the same trials after any restart, budgets, and likely epochs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from hetctl.methods.automl.search_run import SearchRun, UsedResources, likely_configs, search_parts
from hetctl.model.errors import BadInputError
from hetctl.model.searches import REPORT, TRIAL, NamedPart, SearchBudget, SearchSpec, Trial

pytest.importorskip("optuna")

SPACE = {"lr": {"log_uniform": [0.001, 0.1]}, "layers": {"integer": [1, 8]}, "kind": {"choice": ["a", "b"]}}
CHOICES = {"lr": {"choice": [0.1, 0.01]}, "kind": {"choice": ["a", "b", "c"]}}
TPE = NamedPart("TPESampler", {"n_startup_trials": 3})
MEDIAN = NamedPart("MedianPruner", {"n_startup_trials": 2})
NOTHING = UsedResources(0.0, 0.0)


def search(method: str, epochs: int, space: Any = None, **more: Any) -> SearchSpec:
    spec = SearchSpec(method, (), SPACE if space is None else space, epochs, **more)
    made, _ = search_parts(spec)
    return replace(spec, members=tuple(f"t{number}" for number in range(made.slots)))


SEARCHES = {
    "grid": search("grid", 3, CHOICES),
    "random": search("random", 3, settings={"trials": 5}),
    "hyperband": search("hyperband", 9),
    "asha": search("asha", 9, settings={"trials": 12, "eta": 3}),
    "pbt": search("pbt", 6, settings={"trials": 4, "every": 2, "mutate": {"layers": {"add": [-1, 1]}}}),
    "optuna": search("optuna", 6, settings={"trials": 8, "every": 2}, sampler=TPE, pruner=MEDIAN),
    "optuna-asha": search("asha", 9, settings={"trials": 9, "eta": 3}, sampler=TPE),
}


def loss_of(trial: Trial) -> float:
    return random.Random(f"{dict(trial.config)}").random() + 1 / trial.epochs


def driven(spec: SearchSpec, *, restarts: bool) -> tuple[list[tuple[str, Any]], SearchRun]:
    """Run a search with two workers that take the trials in turn; optionally, restart it at each event."""
    events: list[tuple[str, Any]] = []
    run = SearchRun(spec, 2)
    while run.reason_to_end(NOTHING) is None:
        for request in run.requests(NOTHING):
            events.append((TRIAL, request))
        if restarts:
            run = SearchRun(spec, 2, events)
        trial = run.waiting[0]
        told = run.report(trial, [loss_of(trial)])
        assert told is not None
        assert run.report(trial, [0.0]) is None
        events.append((REPORT, told))
        if restarts:
            run = SearchRun(spec, 2, events)
    return events, run


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_restarted_at_each_event_is_the_same(name: str) -> None:
    whole, run = driven(SEARCHES[name], restarts=False)
    again, _ = driven(SEARCHES[name], restarts=True)
    assert again == whole
    asked = [(data["number"], data["epochs"]) for kind, data in whole if kind == TRIAL]
    assert len(set(asked)) == len(asked)
    assert max(epochs for _, epochs in asked) == SEARCHES[name].epochs
    assert len(run.trials) <= len(SEARCHES[name].members)


@pytest.mark.parametrize("name", SEARCHES)
def test_plans_have_a_config_and_epochs_for_each_trial(name: str) -> None:
    spec = SEARCHES[name]
    method, source = search_parts(spec)
    configs, epochs = likely_configs(spec, method, source), method.likely_epochs()
    assert len(configs) == len(epochs) == len(spec.members)
    assert all(1 <= count <= spec.epochs for count in epochs)
    if spec.configs_are_known:
        events, _ = driven(spec, restarts=False)
        assert all(data["config"] == configs[data["number"]] for kind, data in events if kind == TRIAL)


def test_a_pruner_ends_trials_without_prospects() -> None:
    events, run = driven(SEARCHES["optuna"], restarts=False)
    ended = {trial.number: loss_of(trial) for trial in run.trials if trial.epochs < 6}
    whole = {trial.number: loss_of(trial) for trial in run.trials if trial.epochs == 6}
    assert ended
    assert min(whole.values()) < min(ended.values())
    assert sum(kind == TRIAL for kind, _ in events) < 3 * 8


def test_trials_that_fail_are_not_asked_for_again() -> None:
    for spec in SEARCHES.values():
        run = SearchRun(spec, 2)
        first = next(iter(run.requests(NOTHING)))
        list(run.requests(NOTHING))
        run.report(run.trials[0], None)
        rest = [request["number"] for request in run.requests(NOTHING)]
        assert first["number"] == 0
        assert 0 not in rest


@pytest.mark.parametrize(
    ("budget", "resources", "reason"),
    [
        (SearchBudget(epochs=4), NOTHING, "its budget of 4 epochs is used up"),
        (SearchBudget(gpu_hours=0.5), UsedResources(0.5, 0.0), "its budget of 0.5 GPU-hours is used up"),
        (SearchBudget(time_s=60.0), UsedResources(0.0, 61.0), "its budget of 60 seconds is used up"),
    ],
)
def test_a_budget_lets_trials_end_and_begins_none(
    budget: SearchBudget, resources: UsedResources, reason: str
) -> None:
    run = SearchRun(replace(SEARCHES["random"], budget=budget, parallel=1), 2)
    requests = run.requests(NOTHING)
    next(requests)
    if budget.epochs:
        next(requests)
    assert list(run.requests(resources)) == []
    assert run.reason_to_end(resources) is None
    for trial in run.waiting:
        run.report(trial, [1.0])
    assert run.reason_to_end(resources) == reason


def test_trials_at_a_time_are_limited_where_reports_count() -> None:
    assert len(list(SearchRun(SEARCHES["asha"], 3).requests(NOTHING))) == 3
    assert len(list(SearchRun(replace(SEARCHES["asha"], parallel=5), 3).requests(NOTHING))) == 5
    assert len(list(SearchRun(SEARCHES["random"], 3).requests(NOTHING))) == 5


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sampler": NamedPart("NoSampler")}, "sampler NoSampler is not a class of optuna.samplers"),
        ({"sampler": NamedPart("TPESampler", {"no": 1})}, "sampler TPESampler cannot be used"),
        ({"pruner": NamedPart("NoPruner")}, "pruner NoPruner is not a class of optuna.pruners"),
        ({"pruner": NamedPart("PercentilePruner")}, "pruner PercentilePruner cannot be used"),
    ],
)
def test_wrong_parts_of_optuna_are_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        search("optuna", 4, settings={"trials": 3}, **more)


def test_a_pruner_may_wrap_another_one() -> None:
    options = {"wrapped_pruner": {"name": "MedianPruner"}, "patience": 1}
    spec = search("optuna", 4, settings={"trials": 3}, pruner=NamedPart("PatientPruner", options))
    assert driven(spec, restarts=False)[0]
