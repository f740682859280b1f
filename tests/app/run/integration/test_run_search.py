"""Searches that drive real runs on this machine: scripts and networks, killed and continued."""

from __future__ import annotations

import csv
import json
import shutil
import sqlite3
import sys
from contextlib import closing, suppress
from functools import partial

import pytest
from workbench import TINY, kill_all, new_project, wait_for

from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.methods.automl.search_run import SearchRun, UsedResources
from hetctl.storage.progress_fold import events_in

RUN = "found-001"
SPACE = {"learning_rate": {"log_uniform": [0.001, 0.1]}, "width": {"choice": [16, 32]}}
NOTHING = UsedResources(0.0, 0.0)
METHODS = {
    "asha": {"trials": 6, "epochs": 4, "eta": 2, "parallel": 1},
    "pbt": {"trials": 4, "epochs": 6, "every": 2, "mutate": {"learning_rate": {"multiply": [0.5, 2]}}},
    "grid": {"epochs": 2, "space": {"learning_rate": {"choice": [0.01, 0.1]}, "width": {"choice": [16, 32]}}},
    "optuna": {"trials": 6, "epochs": 4, "every": 2, "pruner": "MedianPruner", "parallel": 1},
}


def project_of(folder, method: str, **more):
    search = {"method": method, "space": SPACE, "max_gpus": 1, **METHODS[method], **more}
    words = [sys.executable, "searched_script.py", "{learning_rate}", "{width}"]
    text = {"name": "found", "command": words, "stop": {"metric": "loss", "patience": 99}, "search": search}
    project = new_project(folder, json.dumps(text), environment={"HETCTL_SITE": "local"})
    shutil.copy(TINY / "searched_script.py", project.path)
    with_rates(project)
    return project


def with_rates(project):
    names = [member.name for member in read_ensemble(project.path / "ensemble.yaml").members]
    rows = ["member,gpus,rate,samples", *(f"{name},1,1000,600" for name in names), ""]
    (project.path / "rates.csv").write_text("\n".join(rows))
    assert project.here("profile", "import", "rates.csv").code == 0


def submitted(project, *options: str):
    return project.here("submit", "--gpus", "2", "--wait", "--json", *options)


def told(project, kind: str) -> list[dict]:
    return [event.data for event in events_in(project.home.run(RUN)) if event.kind == kind]


def results(project) -> dict:
    """The configs of the trials, and their losses by epochs."""
    configs = {event["number"]: event["config"] for event in told(project, "trial")}
    losses = {(event["number"], event["epochs"]): event["loss"] for event in told(project, "trial_report")}
    return {"configs": configs, "losses": losses}


def asked_twice(project) -> list:
    asked = [(event["number"], event["epochs"]) for event in told(project, "trial")]
    return [one for one in asked if asked.count(one) > 1]


def expected(project) -> dict:
    """The results that a search in this process comes to."""
    search = read_ensemble(project.path / "ensemble.yaml").search
    run = SearchRun(search, parallel=2)
    losses = {}
    while run.reason_to_end(NOTHING) is None:
        list(run.requests(NOTHING))
        trial = run.waiting[0]
        rate, width = trial.config["learning_rate"], trial.config["width"]
        losses[trial.number, trial.epochs] = abs(rate - 0.02) + 1 / (trial.epochs + width)
        run.report(trial, [losses[trial.number, trial.epochs]])
    return {"configs": {trial.number: trial.config for trial in run.trials}, "losses": losses}


@pytest.mark.parametrize(("method", "kills"), [("asha", (1,)), ("pbt", (5,))])
def test_a_search_drives_a_run_also_if_it_is_killed(method, kills, tmp_path):
    pytest.importorskip("optuna")
    project = project_of(tmp_path / "project", method)
    assert project.here("submit", "--gpus", "2").code == 0
    for reports in kills:
        wait_for(partial(has_come_to, project, reports))
        kill_all(str(project.path))
        assert project.here("submit").code == 0
    check_results(project, method)
    MORE[method](project)


def check_results(project, method):
    """Wait for the end of a search; check its results, and what commands show of them."""
    wait_for(lambda: told(project, "job_ended"))
    assert results(project) == expected(project)
    assert asked_twice(project) == []
    shown = project.here("search", "show", "--json").json
    assert (shown["method"], bool(shown["ended"])) == (method, True)
    best = [trial["best"] for trial in shown["trials"]]
    assert best == sorted(best)
    rows = list(csv.DictReader(project.here("search", "export").stdout.splitlines()))
    assert [row["trial"] for row in rows] == [f"trial-{n:03d}" for n in range(len(rows))]
    assert best[0] == min(float(row["best_loss"]) for row in rows)
    assert study_of(project).best_value == min(
        float(r["last_loss"]) for r in rows if r["state"] == "converged"
    )
    assert f"{shown['trials'][0]['member']} " in project.here("search", "show", "--best", "1").stdout
    assert "learning_rate=" in project.here("status").stdout


def study_of(project):
    """Export the search as a study of Optuna, once, and open it."""
    import optuna

    for _ in range(2):
        assert project.here("search", "export", "--study", "trials.db").code == 0
    assert [path.name for path in project.path.iterdir() if "trials.db" in path.name] == ["trials.db"]
    return optuna.load_study(study_name=RUN, storage=f"sqlite:///{project.path}/trials.db")


def test_a_study_follows_a_run_and_no_other_file_is_touched(tmp_path):
    optuna = pytest.importorskip("optuna")
    project = project_of(tmp_path / "project", "optuna", trials=12)
    assert project.here("submit", "--gpus", "2").code == 0
    wait_for(partial(has_come_to, project, 1))
    follower = project.start("search", "export", "--study", "trials.db", "--watch")
    wait_for(partial(has_a_running_trial, project.path / "trials.db"))
    storage = f"sqlite:///{project.path}/trials.db"
    assert follower.wait(120) == 0
    states = [trial.state.name for trial in optuna.load_study(study_name=RUN, storage=storage).trials]
    assert len(states) == 12
    assert set(states) == {"COMPLETE", "PRUNED"}
    check_results(project, "optuna")
    (project.path / "notes.db").write_text("mine")
    refused = project.here("search", "export", "--study", "notes.db")
    assert refused.code == 2
    assert f"notes.db exists already, and has no study of run {RUN}" in refused.stderr
    assert (project.path / "notes.db").read_text() == "mine"
    assert project.here("search", "export", "--watch").code == 2


def has_a_running_trial(study) -> bool:
    # The file is there before its tables, and these are before the trials.
    with (
        suppress(sqlite3.OperationalError),
        closing(sqlite3.connect(f"file:{study}?mode=ro", uri=True)) as db,
    ):
        return bool(db.execute("SELECT 1 FROM trials WHERE state = 'RUNNING'").fetchone())
    return False


def promoted_trials_go_on(project):
    promoted = {event["member"] for event in told(project, "trial") if event["epochs"] > 1}
    assert promoted
    for name in promoted:
        # Each start reports the last epoch again, in case that its report was lost.
        assert sorted(set(project.epochs(RUN)[name])) == list(
            range(1, len(set(project.epochs(RUN)[name])) + 1)
        )
        assert "start after 0 epochs" in project.home.run(RUN).log_of(name).read_text()


def mutants_begin_with_the_state_of_their_parents(project):
    mutants = [event for event in told(project, "trial") if event.get("parent") and event["epochs"] == 4]
    assert len(mutants) == 2
    trained = project.epochs(RUN)
    for mutant in mutants:
        # The parent's two epochs, then its own.
        assert trained[mutant["member"]][:4] == [1, 2, 3, 4]
        log = project.home.run(RUN).log_of(mutant["member"]).read_text()
        assert "start after 2 epochs" in log
        parent = results(project)["configs"][mutant["parent"]["trial"]]
        likely = [min(max(parent["learning_rate"] * factor, 0.001), 0.1) for factor in (0.5, 2)]
        assert mutant["config"] == {**parent, "learning_rate": mutant["config"]["learning_rate"]}
        assert mutant["config"]["learning_rate"] in likely


MORE = {"asha": promoted_trials_go_on, "pbt": mutants_begin_with_the_state_of_their_parents}


def has_come_to(project, reports: int) -> bool:
    return len(told(project, "trial_report")) >= reports


def test_a_budget_of_epochs_ends_a_search(tmp_path):
    project = project_of(tmp_path / "project", "grid", budget={"epochs": 3})
    done = submitted(project)
    assert done.json["reason"] == "the search has ended: its budget of 3 epochs is used up"
    assert len(results(project)["configs"]) == 2


def test_a_search_goes_by_its_own_metric_also_within_an_epoch(tmp_path):
    space = {**SPACE, "learning_rate": {"choice": [0.1, 0.01]}, "width": {"choice": [16, 32]}}
    rule = {"metric": "fit", "mode": "max", "trials": 2}
    project = project_of(tmp_path / "project", "grid", metric="fit", mode="max", space=space, prune=rule)
    project.environment["LEAST_RATE"] = "0.05"
    assert submitted(project).code == 0
    # The two worse ones were ended in their first epoch, and count by what they had reported.
    assert sorted(project.epochs(RUN)) == ["trial-000", "trial-001"]
    rates = {number: config["learning_rate"] for number, config in results(project)["configs"].items()}
    assert {n: -loss for (n, _), loss in results(project)["losses"].items()} == rates
    shown = project.here("search", "show", "--json").json
    assert (shown["metric"], shown["mode"]) == ("fit", "max")
    assert [trial["best"] for trial in shown["trials"]] == [0.1, 0.1, None, None]
    assert [trial["last"] for trial in shown["trials"]] == [0.1, 0.1, 0.01, 0.01]
    assert sorted(study_of(project).best_params.items())[0] == ("learning_rate", 0.1)


def test_a_search_by_several_metrics_has_a_front(tmp_path):
    project = project_of(tmp_path / "project", "asha", metric="fit", mode="max", also={"loss": "min"})
    assert submitted(project).code == 0
    reports = told(project, "trial_report")
    assert all(len(report["more"]) == 1 for report in reports)
    shown = project.here("search", "show", "--json").json
    values = {each["number"]: (-each["last"], each["also"]["loss"]) for each in shown["trials"]}
    front = {each["number"] for each in shown["trials"] if each["on_front"]}
    worse = {
        n
        for n, (a, b) in values.items()
        if any(x <= a and y <= b for x, y in values.values() if (x, y) != (a, b))
    }
    assert front == values.keys() - worse
    assert "on the Pareto front" in project.here("search", "show").stdout
    assert project.here("report", "-o", "page.html").code == 0
    assert "Pareto front" in (project.path / "page.html").read_text()
    rows = list(csv.DictReader(project.here("search", "export").stdout.splitlines()))
    assert {int(row["trial"].rpartition("-")[2]) for row in rows if row["on_front"] == "True"} == front


def test_a_trial_that_is_cancelled_ends_and_a_paused_one_waits(tmp_path):
    project = project_of(
        tmp_path / "project", "asha", epochs=200, eta=2, min_epochs=100, trials=3, parallel=3
    )
    started = project.start("submit", "--gpus", "2", "--wait", "--json")
    wait_for(lambda: project.home.run(RUN).path.exists() and len(told(project, "trial")) == 3)
    wait_for(lambda: project.here("status", "--json").json["states"]["trial-000"] == "training")
    assert project.here("pause", "trial-000").code == 0
    assert project.here("cancel", "trial-001").code == 0
    started.communicate(timeout=240)
    by_number = {event["number"]: event["loss"] for event in told(project, "trial_report")}
    assert by_number[1] is None
    assert 2 in by_number
    status = project.here("status", "--json").json
    assert (status["states"]["trial-000"], status["states"]["trial-001"]) == ("paused", "cancelled")
    assert status["state"] == "stopped"
    assert project.here("resume", "trial-000").code == 0
    assert submitted(project).code == 0
    assert told(project, "search_ended")


def test_a_search_without_its_metric_fails_with_the_cause(tmp_path):
    project = project_of(tmp_path / "project", "grid", metric="f1")
    assert submitted(project).code != 0
    (row, *_) = project.here("status", "--json").json["members"]
    assert "the search's metric f1 is not among the results: fit, loss" in row["reason"]
