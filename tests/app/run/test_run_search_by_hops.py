"""Searches whose trials hop, on this machine: killed and continued, no visit is lost or made twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter

import numpy as np
import pytest
from tiny_networks import ENSEMBLES
from workbench import alive, new_project, wait_for

from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.run_visit import DONE
from hetctl.storage.progress_fold import events_in
from hetctl.storage.visit_fold import VisitLog, violations

pytestmark = pytest.mark.training
RUN, PARTS = "found-001", 3
METHODS = {
    "asha": {"trials": 6, "epochs": 4, "eta": 2, "parallel": 2},
    "pbt": {"trials": 4, "epochs": 6, "every": 2, "mutate": {"learning_rate": {"multiply": [0.5, 2]}}},
}
SEARCH = {
    "config": {"optimizer": "momentum", "decay": True, "pause_s": 0.02},
    "space": {"learning_rate": {"log_uniform": [0.001, 0.1]}, "units": {"choice": [16, 32]}},
    **{"batch_size": 16, "max_gpus": 1},
}


@pytest.fixture
def project(request, tmp_path):
    """A project with a search by the method that the test names."""
    home = tmp_path / "project"
    place_partitions(tmp_path)
    text = {
        "name": "found",
        "framework": "pytorch",
        "functions": {
            "input_fn": "handwriting:staged_input_fn",
            "model_fn": "tiny_torch:model_fn",
            "train_fn": "tiny_torch:fit_train_fn",
        },
        "partitions": {"count": PARTS, "path": f"{tmp_path}/{{partition}}.npz"},
        "samples_per_epoch": 100 * PARTS,
        "stop": {"metric": "val_loss", "patience": 99},
        "search": {"method": request.param, **SEARCH, **METHODS[request.param]},
    }
    project = new_project(home, json.dumps(text), environment={"HETCTL_SITE": "local"})
    for module in ("handwriting", "tiny_torch"):
        shutil.copy(ENSEMBLES / f"{module}.py", home)
    names = [member.name for member in read_ensemble(home / "ensemble.yaml").members]
    rows = ["member,gpus,rate,samples", *(f"{name},1,500,600" for name in names), ""]
    (home / "rates.csv").write_text("\n".join(rows))
    assert project.here("profile", "import", "rates.csv").code == 0
    return project


def place_partitions(folder):
    rng = np.random.default_rng(0)
    x, y = rng.random((130 * PARTS, 8, 8, 1), dtype=np.float32), rng.integers(0, 10, 130 * PARTS)
    for number in range(PARTS):
        own = slice(130 * number, 130 * number + 100)
        held_out = slice(own.stop, own.stop + 30)
        arrays = {"x": x[own], "y": y[own], "x_validation": x[held_out], "y_validation": y[held_out]}
        np.savez(folder / f"{number}.npz", **arrays)


def events_of(project):
    return events_in(project.home.run(RUN))


def told(project, kind):
    return [event.data for event in events_of(project) if event.kind == kind]


def end_job(project):
    def none_left():
        pids = alive(str(project.path))
        for pid in pids:
            try:
                os.killpg(os.getpgid(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not pids

    wait_for(none_left)


@pytest.mark.parametrize(("project", "kills"), [("asha", (1, 5)), ("pbt", (3, 5))], indirect=["project"])
def test_a_search_by_hops_goes_on_after_kills(project, kills):
    options = ("submit", "--gpus", "2", "--mode", "hopper")
    (project.path / "hops.jsonl").write_text("")
    assert "leave out --replay" in project.here(*options, "--replay", "hops.jsonl").stderr
    assert project.hetctl(*options).code == 0
    for reports in kills:
        wait_for(lambda: len(told(project, "trial_report")) >= reports)  # noqa: B023
        end_job(project)
        assert project.here("submit").code == 0
    wait_for(lambda: told(project, "search_ended"), 120)
    wait_for(lambda: project.here("status", "--json").json["state"] == "finished", 60)
    asked = [(event["number"], event["epochs"]) for event in told(project, "trial")]
    reported = [(event["number"], event["epochs"]) for event in told(project, "trial_report")]
    assert max(Counter(asked).values()) == 1
    assert sorted(asked) == sorted(reported)
    assert all(event["loss"] is not None for event in told(project, "trial_report"))
    assert_each_epoch_is_visited_once(project)
    MORE[project.here("search", "show", "--json").json["method"]](project)


def assert_each_epoch_is_visited_once(project):
    most = {event["member"]: event["epochs"] for event in told(project, "trial")}
    begun = {
        event["member"]: (event.get("parent") or {}).get("epochs", 0) for event in told(project, "trial")
    }
    visits = VisitLog(project.home.run(RUN), most).look().visits
    done = Counter((v.member, v.epoch, v.evaluates, v.partition) for v in visits if v.state == DONE)
    wanted = {
        (name, epoch, evaluates, partition)
        for name in most
        for epoch in range(begun[name] + 1, most[name] + 1)
        for evaluates in (False, True)
        for partition in range(PARTS)
    }
    assert done == Counter(wanted)
    # Those of a mutant's first epochs are its parent's.
    own = {name: epochs for name, epochs in most.items() if not begun[name]}
    assert violations([visit for visit in visits if visit.member in own], PARTS, own) == []


def promoted_trials_go_on(project):
    assert any(event["epochs"] == 4 for event in told(project, "trial"))


def mutants_begin_after_the_epochs_of_their_parents(project):
    mutants = [event for event in told(project, "trial") if event.get("parent")]
    assert len({event["member"] for event in mutants}) == 4
    for mutant in mutants:
        epochs = project.epochs(RUN)[mutant["member"]]
        assert epochs == list(range(1, len(epochs) + 1))
        assert len(epochs) in (4, 6)


MORE = {"asha": promoted_trials_go_on, "pbt": mutants_begin_after_the_epochs_of_their_parents}
