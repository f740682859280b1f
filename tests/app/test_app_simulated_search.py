"""A search under a virtual clock asks for the trials of a run, with losses that are drawn."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from hetctl.app.simulated_search import SimulatedSearch, likely_search
from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.methods.automl.search_run import SearchRun, UsedResources
from hetctl.model.errors import BadInputError
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Options
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

SPACE = {"lr": {"log_uniform": [0.001, 0.1]}, "width": {"choice": [16, 32]}}
METHODS = {
    "grid": {"method": "grid", "epochs": 3, "space": {"width": {"choice": [1, 2, 3, 4]}}},
    "random": {"method": "random", "trials": 7, "epochs": 3, "space": SPACE},
    "asha": {"method": "asha", "trials": 16, "epochs": 16, "space": SPACE},
    "hyperband": {"method": "hyperband", "epochs": 9, "space": SPACE},
    "pbt": {
        **{"method": "pbt", "trials": 4, "epochs": 6, "every": 2, "space": SPACE},
        "mutate": {"lr": {"multiply": [0.8, 1.2]}},
    },
}
PER_EPOCH = 100


def ensemble_of(tmp_path, search, members=()):
    file = tmp_path / "e.yaml"
    file.write_text(json.dumps({"name": "e", "command": "train {width}", "search": search, **dict(members)}))
    return read_ensemble(file)


def workloads_of(ensemble, per_epoch=PER_EPOCH):
    return {
        member.name: Workload(member.name, {1: 10.0}, 1.0, per_epoch, startup_s=3.0, restart_s=1.0)
        for member in ensemble.members
    }


def simulated(ensemble, gpus, seed=0):
    search = SimulatedSearch(ensemble, workloads_of(ensemble), gpus, seed)
    arrivals = [*map(Arrival, search.first())]
    scenario = Scenario(Cluster.of_types({"": (gpus, gpus)}))
    return simulate(planner_named("fluid"), arrivals, scenario, Options(), search.after), search.outcome


def epochs_alone(ensemble, seed=0):
    """Return the epochs that a search asks for if trials come one after another."""
    search, asked = SearchRun(ensemble.search, 1), 0
    done = {}
    while requests := list(search.requests(UsedResources(0.0, 0.0))):
        for request in requests:
            parent = request["parent"]
            before = done.get(request["number"], parent["epochs"] if parent else 0)
            done[request["number"]] = request["epochs"]
            asked += request["epochs"] - before
        for trial in search.waiting:
            search.report(trial, [random.Random(f"{seed}:{trial.number}").random()])
    return asked


def test_a_search_of_one_shape_that_fuses_has_as_many_trials_at_a_time_as_train_together(tmp_path):
    ensemble = ensemble_of(tmp_path, METHODS["asha"])
    alone = workloads_of(ensemble)
    fused = {name: replace(one, fuses="shape") for name, one in alone.items()}
    asked = [len(SimulatedSearch(ensemble, workloads, 1, 0).first()) for workloads in (alone, fused)]
    assert asked == [1, min(16, len(ensemble.trials))]


@pytest.mark.parametrize("name", METHODS)
def test_one_gpu_trains_what_the_search_alone_asks_for(tmp_path, name):
    ensemble = ensemble_of(tmp_path, METHODS[name])
    result, outcome = simulated(ensemble, 1)
    assert outcome.epochs == epochs_alone(ensemble)
    assert sum(one.samples for one in result.intervals) == pytest.approx(PER_EPOCH * outcome.epochs)
    trained = {one.member for one in result.intervals}
    assert len(trained) == outcome.trials
    assert {member.member for member in result.members} == trained


@pytest.mark.parametrize("name", METHODS)
def test_more_gpus_search_faster_and_keep_to_their_number(tmp_path, name):
    ensemble = ensemble_of(tmp_path, METHODS[name])
    alone, _ = simulated(ensemble, 1)
    together, outcome = simulated(ensemble, 4)
    assert together.lower_bound_s <= together.makespan_s < alone.makespan_s
    assert outcome.finished >= 1
    for at in {one.start_s for one in together.intervals}:
        assert sum(one.gpus for one in together.intervals if one.start_s <= at < one.end_s) <= 4


def test_a_trial_that_goes_on_restarts(tmp_path):
    result, outcome = simulated(ensemble_of(tmp_path, METHODS["asha"]), 2)
    starts = {}
    for one in result.intervals:
        starts.setdefault(one.member, []).append(one.restart_s)
    assert {own[0] for own in starts.values()} == {3.0}
    assert {again for own in starts.values() for again in own[1:]} == {1.0}
    assert result.restarts == len(result.intervals) - outcome.trials > 0


def test_a_used_up_budget_ends_a_simulated_search(tmp_path):
    budget = {"epochs": 5}
    _, outcome = simulated(ensemble_of(tmp_path, {**METHODS["asha"], "budget": budget}), 2)
    assert 5 <= outcome.epochs < 10
    _, outcome = simulated(ensemble_of(tmp_path, {**METHODS["asha"], "budget": {"time": "1m"}}), 2)
    assert outcome.trials < 16


def test_members_beside_the_search_ask_for_nothing(tmp_path):
    members = [("members", [{"name": "a", "config": {"width": 1}}])]
    ensemble = ensemble_of(tmp_path, METHODS["random"], members)
    search = SimulatedSearch(ensemble, workloads_of(ensemble), 1, 0)
    assert [one.name for one in search.first()] == ["a", *(f"trial-{n:03d}" for n in range(7))]
    assert search.after("a", 1.0, 1.0) == []


@pytest.mark.parametrize("name", METHODS)
def test_without_a_planner_a_search_trains_the_same_epochs(tmp_path, name):
    ensemble = ensemble_of(tmp_path, METHODS[name])
    workloads = workloads_of(ensemble)
    search = SimulatedSearch(ensemble, workloads, 1, 0).on_least_gpus()
    assert sum(map(search.epochs, search.trials)) == epochs_alone(ensemble)
    assert max(trial.epochs for trial in search.trials.values()) == METHODS[name]["epochs"]
    assert search.waits == pytest.approx(1.0)
    alike = SimulatedSearch(ensemble, workloads, 4, 0).on_least_gpus()
    assert search.seconds > alike.seconds >= 10 * sum(map(alike.epochs, alike.trials)) / 4
    # Others have enough trials for all GPUs at each time.
    assert (alike.waits > 1.05) == (name == "asha")


def test_a_search_without_epochs_is_not_foreseen(tmp_path):
    ensemble = ensemble_of(tmp_path, METHODS["asha"])
    assert likely_search(ensemble, list(workloads_of(ensemble, None).values()), 4) is None
    plain = ensemble_of(tmp_path, None, [("members", [{"name": "a", "config": {"width": 1}}])])
    assert likely_search(plain, list(workloads_of(plain).values()), 4) is None


def test_epochs_of_unknown_length_are_refused(tmp_path):
    ensemble = ensemble_of(tmp_path, METHODS["random"])
    with pytest.raises(BadInputError, match="the samples of an epoch of trial-000 are not known"):
        SimulatedSearch(ensemble, workloads_of(ensemble, None), 1, 0)
