"""One story with real training: profile, plan, submit, status, report."""

from __future__ import annotations

import shutil

import pytest
from workbench import TINY, new_project

pytestmark = pytest.mark.training
MEMBERS = {
    "small": "{name: small, max_gpus: 1, config: {units: 16}}",
    "large": "{name: large, max_gpus: 1, config: {units: 64}}",
    "broken": "{name: broken, max_gpus: 1, config: {broken: true}}",
}
ENSEMBLE = """\
name: tiny
framework: tensorflow
functions: {{input_fn: tiny:input_fn, model_fn: tiny:model_fn}}
stop: {{metric: val_accuracy, mode: max, patience: 5, max_epochs: 3}}
members: [{members}]
"""


def test_from_profile_to_report(tmp_path):
    project = new_project(
        tmp_path / "project",
        ENSEMBLE.format(members=", ".join(MEMBERS.values())),
        environment={"HETCTL_SITE": "local"},
    )
    for module in ("tiny.py", "handwriting.py"):
        shutil.copy(TINY / module, project.path)

    first = project.here("profile", "--json")
    assert (first.code, first.error["kind"]) == (5, "members-failed")
    assert [failure["point"]["member"] for failure in first.json["failures"]] == ["broken"]
    assert "ValueError: no such network" in first.json["failures"][0]["error"]
    assert any("no such network" in line for line in first.json["failures"][0]["log_tail"])
    assert {point["member"] for point in first.json["points"]} == {"small", "large"}
    assert all(point["rate"] > 0 and point["samples_per_epoch"] == 640 for point in first.json["points"])

    del MEMBERS["broken"]
    (project.path / "ensemble.yaml").write_text(ENSEMBLE.format(members=", ".join(MEMBERS.values())))
    mended = project.here("profile", "--json")
    assert (mended.code, mended.json["measured"], mended.json["known"]) == (0, 0, 2)

    plan = project.here("plan", "--json")
    assert plan.code == 0
    assert plan.json["predicted_makespan_s"] >= plan.json["lower_bound_s"] > 0

    run = project.here("submit", "--wait", "--json")
    assert (run.code, run.json["state"]) == (0, "finished")
    assert {member["state"] for member in run.json["members"]} == {"converged"}
    assert all(member["best"] > 0.1 for member in run.json["members"])
    assert project.epochs("tiny-001") == {"small": [1, 2, 3], "large": [1, 2, 3]}

    shown = project.here("status")
    assert shown.code == 0
    assert "finished" in shown.stdout
    assert project.here("report", "-o", "page.html").code == 0
    page = (project.path / "page.html").read_text()
    assert "small" in page
    assert "large" in page
    assert "tiny-001" in page
