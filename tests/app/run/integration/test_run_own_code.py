"""A run whose members have frameworks, functions and data of their own, on this machine."""

from __future__ import annotations

import json
import shutil

import pytest
from ensembles.sequences import SAMPLES
from workbench import TINY, alive, new_project, wait_for

from hetctl.storage.progress_fold import events_in

pytestmark = pytest.mark.training
ROWS = {"input_fn": "handwriting:rows_input_fn", "model_fn": "tiny_torch:model_fn"}
ENSEMBLE = {
    "name": "mixed",
    "framework": "pytorch",
    "functions": {"input_fn": "sequences:input_fn", "model_fn": "sequences:torch_model_fn"},
    "batch_size": 12,
    "stop": {"metric": "val_loss", "max_epochs": 2, "patience": 9},
    "members": [
        {"name": "a"},
        {
            "name": "k",
            "framework": "tensorflow",
            "functions": {"input_fn": "tiny:input_fn", "model_fn": "tiny:model_fn"},
        },
        {"name": "b", "config": {"x": 1}, "max_gpus": 1},
        {"name": "r", "functions": ROWS, "max_gpus": 1},
    ],
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("READINGS", str(tmp_path / "readings"))
    project = new_project(tmp_path / "project", json.dumps(ENSEMBLE), environment={"HETCTL_SITE": "local"})
    for module in ("sequences", "tiny", "tiny_torch", "handwriting"):
        shutil.copy(TINY / f"{module}.py", project.path)
    return project


def test_members_of_two_frameworks_and_three_data_sets_train(project):
    measured = project.here("profile", "--all", "--gpus", "2", "--json")
    assert measured.code == 0, measured
    points = {(point["member"], point["gpus"]): point for point in measured.json["points"]}
    assert set(points) == {("a", 1), ("a", 2), ("k", 1), ("k", 2), ("b", 1), ("r", 1)}
    assert measured.json["stale"] == []
    refused = project.here("submit", "--gpus", "2", "--sharing", "lockstep")
    assert (refused.code, "use --sharing cached" in refused.stderr) == (2, True)
    done = project.here("submit", "--gpus", "2", "--wait", "--json")
    assert done.code == 0, done
    assert {member["state"] for member in done.json["members"]} == {"converged"}
    events = events_in(project.home.run("mixed-001"))
    epochs = [event for event in events if event.kind == "epoch"]
    assert sorted((event.source, event.data["epoch"]) for event in epochs) == [
        (name, epoch) for name in "abkr" for epoch in (1, 2)
    ]
    # Samples of one member are read by number; the next run begins with their measured throughput.
    assert {event.source for event in events if event.kind == "preprocess"} == {"r"}
    # A rank that is replaced has not failed, nor has one whose member got another number of GPUs.
    assert {event.data["reason"] for event in events if event.kind == "task_ended"} <= {"finished", "told"}
    kept = [path.name for path in project.home.run("mixed-001").modules.glob("*/*.py")]
    assert {"sequences.py", "tiny.py", "tiny_torch.py"} <= set(kept)
    assert SAMPLES in {profile["samples_per_epoch"] for profile in measured.json["points"]}
    wait_for(lambda: not alive(str(project.path)))
