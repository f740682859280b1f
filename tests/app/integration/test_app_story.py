"""One story with real training: profile, plan, submit, status, report.

Its members have frameworks, functions and data of their own.
"""

from __future__ import annotations

import json
import shutil

import pytest
from ensembles.sequences import SAMPLES
from workbench import TINY, alive, new_project, wait_for

from hetctl.storage.progress_fold import events_in

pytestmark = pytest.mark.training
TORCH = {"input_fn": "tiny_torch:input_fn", "model_fn": "tiny_torch:model_fn"}
KERAS = {"input_fn": "tiny:input_fn", "model_fn": "tiny:model_fn"}
MEMBERS = [
    {"name": "a"},
    {"name": "k", "framework": "tensorflow", "functions": KERAS},
    {"name": "b", "config": {"x": 1}, "max_gpus": 1},
    {"name": "r", "functions": {**TORCH, "input_fn": "handwriting:rows_input_fn"}, "max_gpus": 1},
    {"name": "broken", "functions": TORCH, "config": {"broken": True}, "max_gpus": 1},
]


def ensemble_of(members):
    return json.dumps(
        {
            "name": "mixed",
            "framework": "pytorch",
            "functions": {"input_fn": "sequences:input_fn", "model_fn": "sequences:torch_model_fn"},
            "batch_size": 12,
            "stop": {"metric": "val_loss", "max_epochs": 2, "patience": 9},
            "members": members,
        }
    )


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("READINGS", str(tmp_path / "readings"))
    project = new_project(tmp_path / "project", ensemble_of(MEMBERS), environment={"HETCTL_SITE": "local"})
    for module in ("sequences", "tiny", "tiny_torch", "handwriting"):
        shutil.copy(TINY / f"{module}.py", project.path)
    return project


def test_from_profile_to_report(project):
    first = project.here("profile", "--all", "--gpus", "2", "--json")
    assert (first.code, first.error["kind"]) == (5, "members-failed")
    assert [failure["point"]["member"] for failure in first.json["failures"]] == ["broken"]
    assert "ValueError: no such network" in first.json["failures"][0]["error"]
    assert any("no such network" in line for line in first.json["failures"][0]["log_tail"])
    points = {(point["member"], point["gpus"]): point for point in first.json["points"]}
    assert set(points) == {("a", 1), ("a", 2), ("k", 1), ("k", 2), ("b", 1), ("r", 1)}
    assert all(point["rate"] > 0 for point in points.values())
    assert {points["a", 1]["samples_per_epoch"], points["k", 1]["samples_per_epoch"]} == {SAMPLES, 640}

    (project.path / "ensemble.yaml").write_text(ensemble_of(MEMBERS[:-1]))
    mended = project.here("profile", "--all", "--gpus", "2", "--json")
    assert (mended.code, mended.json["measured"], mended.json["known"]) == (0, 0, 6)
    assert mended.json["stale"] == []
    plan = project.here("plan", "--gpus", "2", "--json")
    assert plan.code == 0
    assert plan.json["predicted_makespan_s"] >= plan.json["lower_bound_s"] > 0
    refused = project.here("submit", "--gpus", "2", "--sharing", "lockstep")
    assert (refused.code, "use --sharing cached" in refused.stderr) == (2, True)

    done = project.here("submit", "--gpus", "2", "--wait", "--json")
    assert (done.code, done.json["state"]) == (0, "finished"), done
    assert {member["state"] for member in done.json["members"]} == {"converged"}
    assert project.epochs("mixed-001") == {name: [1, 2] for name in "abkr"}
    # A network that guesses has the logarithm of its two or ten classes as its loss.
    assert all(0 < member["best"] < 3 for member in done.json["members"])
    events = events_in(project.home.run("mixed-001"))
    # Samples of one member are read by number; the next run begins with their measured throughput.
    assert {event.source for event in events if event.kind == "preprocess"} == {"r"}
    # A rank that is replaced has not failed, nor has one whose member got another number of GPUs.
    assert {event.data["reason"] for event in events if event.kind == "task_ended"} <= {"finished", "told"}
    kept = [path.name for path in project.home.run("mixed-001").modules.glob("*/*.py")]
    assert {"sequences.py", "tiny.py", "tiny_torch.py"} <= set(kept)
    wait_for(lambda: not alive(str(project.path)))

    shown = project.here("status")
    assert (shown.code, "finished" in shown.stdout) == (0, True)
    assert project.here("report", "-o", "page.html").code == 0
    page = (project.path / "page.html").read_text()
    assert [word for word in ("mixed-001", "broken", *"abkr") if word not in page] == ["broken"]
