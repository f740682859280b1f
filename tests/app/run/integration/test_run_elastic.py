"""A run whose members are resized, with trainers that only pretend to train."""

from __future__ import annotations

import pytest
from workbench import TIMEOUT_S, Result, pretending_project, wait_for

ENSEMBLE = """\
name: pair
framework: tensorflow
functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}
stop: {metric: val_accuracy, mode: max, patience: 50, max_epochs: 60}
members:
  - {name: short, config: {epochs: 2}}
  - {name: long, config: {epochs: 12, held_after: 4, until: released}}
"""
RATES = "member,gpus,rate,samples\nshort,1,100,300\nlong,1,100,3000\nlong,2,190,3000\n"


def started(project):
    """Count the rounds that have started."""
    return sum(event.kind == "round_started" for event in project.driver_events("pair-001"))


def test_a_run_with_resized_members_is_told_right(tmp_path):
    released = tmp_path / "released"
    project = pretending_project(tmp_path, ENSEMBLE.replace("released", str(released)))
    (project.path / "rates.csv").write_text(RATES)
    assert project.here("profile", "import", "rates.csv").code == 0
    command = project.start("submit", "--planner", "doubling", "--gpus", "2", "--wait", "--json")
    wait_for(lambda: started(project) == 2)
    released.touch()
    stdout, stderr = command.communicate(timeout=TIMEOUT_S)
    run = Result(command.returncode, stdout, stderr)
    assert (run.code, run.json["state"]) == (0, "finished"), run
    assert project.epochs("pair-001") == {"short": [1, 2], "long": list(range(1, 13))}
    members = {member["member"]: member for member in run.json["members"]}
    assert {member["state"] for member in members.values()} == {"converged"}
    assert members["long"]["gpus_by_round"] == [1, 2]
    tasks = [task for task in run.json["tasks"] if task["member"] == "long"]
    assert members["long"]["measured_s"] == pytest.approx(sum(s["end_s"] - s["start_s"] for s in tasks))
    assert [round_["ended_by"] for round_ in run.json["rounds"]] == ["resize", "converged"]
    assert "long" in project.here("status").stdout
    assert project.here("report", "-o", "page.html").code == 0
