"""Searches whose trials hop, are pipelines or are divided: killed on this machine, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import numpy as np
import pytest
from hop_rules import broken_by_visits
from piped_run import LAYERS
from tiny_networks import ENSEMBLES
from workbench import kill_all, new_project, wait_for

from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.hops import DONE
from hetctl.storage.progress_fold import events_in
from hetctl.storage.visit_fold import FoldLog, VisitFold

pytestmark = pytest.mark.training
RUN, PARTS = "found-001", 3
METHODS = {
    "asha": {"trials": 4, "epochs": 4, "eta": 2, "parallel": 2},
    "pbt": {"trials": 4, "epochs": 6, "every": 2, "mutate": {"learning_rate": {"multiply": [0.5, 2]}}},
}
SEARCH = {
    "config": {"optimizer": "momentum", "decay": True, "pause_s": 0.02},
    "space": {"learning_rate": {"log_uniform": [0.001, 0.1]}, "units": {"choice": [16, 32]}},
    **{"batch_size": 16, "max_gpus": 1},
}


SITE = """\
extends: local
gpus_per_node: 2
gpu_memory: 1GB
links:
  intra_node: {bytes_per_s: 2.0e9, scaling: 0.8}
  inter_node: {latency_s: 1.0e-4, bytes_per_s: 1.0e9}
"""


@pytest.fixture
def project(request, tmp_path):
    """A project whose trials hop, by the method that the test names."""
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
    return project_of(home, text, ("handwriting", "tiny_torch"), gpus=1)


def project_of(home, text, modules, gpus, site="local"):
    """Make a project of an ensemble; its members have rates on so many slots, or none on 0."""
    project = new_project(home, json.dumps(text), environment={"HETCTL_SITE": site})
    for module in modules:
        shutil.copy(ENSEMBLES / f"{module}.py", home)
    if gpus:
        names = [member.name for member in read_ensemble(home / "ensemble.yaml").members]
        rows = ["member,gpus,rate,samples", *(f"{name},{gpus},500,600" for name in names), ""]
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


@pytest.mark.parametrize(("project", "kills"), [("asha", (1,)), ("pbt", (5,))], indirect=["project"])
def test_a_search_by_hops_goes_on_after_kills(project, kills):
    options = ("submit", "--gpus", "2", "--mode", "hopper")
    (project.path / "hops.jsonl").write_text("")
    assert "--replay does not go with search" in project.here(*options, "--replay", "hops.jsonl").stderr
    assert project.here(*options).code == 0
    for reports in kills:
        wait_for(lambda: len(told(project, "trial_report")) >= reports)  # noqa: B023
        kill_all(str(project.path))
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
    visits = FoldLog(VisitFold(), project.home.run(RUN), most).refresh().visits
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
    assert broken_by_visits([visit for visit in visits if visit.member in own], PARTS, own) == []


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


@pytest.fixture
def piped(request, tmp_path):
    """A project whose trials are pipelines in the framework that the test names."""
    module = {"pytorch": "piped_torch", "tensorflow": "piped_keras"}[request.param]
    text = {
        "name": "found",
        "framework": request.param,
        "functions": {"input_fn": f"{module}:input_fn", "model_fn": f"{module}:model_fn"},
        "samples_per_epoch": 640,
        "stop": {"metric": "val_loss", "patience": 99},
        "search": {
            **{
                "method": "pbt",
                "trials": 2,
                "epochs": 4,
                "every": 2,
                "batch_size": 16,
                "layers": "layers.csv",
            },
            "config": {"optimizer": "momentum"},
            "space": {"learning_rate": {"choice": [1e-5, 0.05]}},
            "mutate": {"learning_rate": {"multiply": [0.5]}},
        },
    }
    home = tmp_path / "project"
    modules = ("handwriting", "piped_torch", "piped_keras")
    project = project_of(home, text, modules, gpus=0, site="lab")
    (home / "layers.csv").write_text(LAYERS)
    (home / "site-configs").mkdir()
    (home / "site-configs" / "lab.yaml").write_text(SITE)
    return project


@pytest.mark.parametrize(
    "piped", ["pytorch", pytest.param("tensorflow", marks=pytest.mark.weekly)], indirect=True
)
def test_a_mutant_that_is_a_pipeline_goes_on_from_its_parent(piped):
    options = ("--gpus", "2", "--mode", "pipeline", "--in-flight", "1")
    for command in ("plan", "submit"):
        assert piped.here(command, *options).code == 0
    wait_for(lambda: len(told(piped, "trial_report")) >= 2)
    kill_all(str(piped.path))
    assert piped.here("submit", "--wait").code == 0
    assert_a_mutant_goes_on_from_its_parent(piped)
    status = piped.here("status", "--json").json
    assert [one["member"] for one in status["pipelines"]] == ["trial-000", "trial-001", "trial-002"]


def assert_a_mutant_goes_on_from_its_parent(project):
    """Look at the first mutant, and return its name."""
    mutant = next(event for event in told(project, "trial") if event.get("parent"))
    epochs = [event for event in events_of(project) if event.kind == "epoch"]
    losses = {(event.source, event.data["epoch"]): event.data["metrics"]["loss"] for event in epochs}
    name, parent = mutant["member"], f"trial-{mutant['parent']['trial']:03d}"
    assert losses[name, 2] == losses[parent, 2] < losses[parent, 1]
    # Its first own epoch begins with the parent's weights, not with fresh ones.
    assert losses[name, 3] < losses[parent, 1]
    trials = project.here("search", "show", "--json").json["trials"]
    assert {trial["state"] for trial in trials} == {"converged", "stopped"}
    return name


@pytest.fixture
def divided(tmp_path):
    """A project whose trials are divided among two slots each."""
    text = {
        "name": "found",
        "framework": "pytorch",
        "functions": {"input_fn": "sharded_torch:input_fn", "model_fn": "sharded_torch:model_fn"},
        "samples_per_epoch": 640,
        "stop": {"metric": "val_loss", "patience": 99},
        "search": {
            **{"method": "pbt", "trials": 2, "epochs": 4, "every": 2, "batch_size": 64},
            **{"shard": True, "gpus": 2, "config": {"optimizer": "momentum"}},
            "space": {"learning_rate": {"choice": [1e-5, 0.05]}},
            "mutate": {"learning_rate": {"multiply": [0.5]}},
        },
    }
    return project_of(tmp_path / "project", text, ("handwriting", "tiny_torch", "sharded_torch"), gpus=2)


def test_a_divided_mutant_goes_on_from_the_parts_of_its_parent(divided):
    assert divided.here("submit", "--gpus", "2").code == 0
    wait_for(lambda: len(told(divided, "trial_report")) >= 2)
    kill_all(str(divided.path))
    assert divided.here("submit", "--wait").code == 0
    name = assert_a_mutant_goes_on_from_its_parent(divided)
    assert list((divided.home.checkpoints / RUN / name).glob("epoch-00004-*.shards"))
