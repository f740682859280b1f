"""Members that join and leave, stop rules and next jobs that change, in a running job and between jobs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys

import pytest
from workbench import (
    TINY,
    asked,
    cancel_all,
    driver_of,
    new_project,
    pretending,
    pretending_project,
    states,
    wait_for,
)

from hetctl.app.run import edit_run
from hetctl.storage.event_files import read_events
from hetctl.storage.run_files import read_spec

LAB = {"HETCTL_SITE": "lab"}
SITE = "extends: local\ngpus_per_node: 3\ncores_per_node: 3\n"
ENDLESS = "{epochs: 4000}"
MEMBERS = {"a": ENDLESS, "b": ENDLESS}
LIMITED = "{epochs: 4000, to_the_limit: true}"


def write(project, most_epochs: int = 5000, **members: str) -> None:
    (project.path / "ensemble.yaml").write_text(pretending("duo", most_epochs, **members))


@pytest.fixture
def begin(tmp_path):
    """Submit a run on three slots; its jobs are cancelled at the end."""
    projects = []

    def start(most_epochs: int = 5000, **members: str):
        project = pretending_project(tmp_path, pretending("duo", most_epochs, **members), environment=LAB)
        (project.path / "site-configs").mkdir()
        (project.path / "site-configs" / "lab.yaml").write_text(SITE)
        projects.append(project)
        assert project.here("submit", "--gpus", "3").code == 0
        return project

    yield start
    cancel_all(projects)


def starts(project, member: str) -> int:
    events = project.driver_events("duo-001")
    return sum(e.kind == "task_started" and e.data["member"] == member for e in events)


def ended(project, member: str) -> bool:
    events = project.driver_events("duo-001")
    return any(e.kind == "task_ended" and e.data["member"] == member for e in events)


def epochs(project, member: str) -> list[int]:
    return project.epochs("duo-001").get(member, [])


REFUSED = {
    ("add",): "run duo-001 has all members of the ensemble file",
    ("add", "nobody"): "nobody: no run, and no new member of the ensemble file, which has none",
    ("drop", "a", "b"): "run duo-001 would have no member left",
    ("drop", "nobody"): "run duo-001 has no member nobody",
    ("change", "nobody", "--patience", "3"): "run duo-001 has no member nobody",
    ("change",): "run duo-001 has nothing to change",
    ("change", "--gpus", "9999"): "9999",
    ("change", "--gpus", "1", "--nodes", "1"): "give it or --gpus",
    ("add", "--from-trial", "duo-001"): "'duo-001' names no trial",
    ("add", "--from-trial", "duo-001:a"): "run duo-001 has no trial 'a' that has begun",
    ("add", "--name", "x"): "--name goes with --from-trial",
}


def test_members_join_and_leave_a_running_job_in_which_others_are_not_restarted(begin):
    """What does not fit the run is refused whole, before."""
    project = begin(**MEMBERS)
    before = read_spec(project.home.run("duo-001"))
    for arguments, said in REFUSED.items():
        assert said in project.here(*arguments, "--json").error["message"]
        assert read_spec(project.home.run("duo-001")) == before, arguments
        assert not project.home.run("duo-001").events_of("_requests").exists(), arguments
    wait_for(lambda: epochs(project, "a") and epochs(project, "b"))
    write(project, **MEMBERS, c=ENDLESS, d=ENDLESS)
    (change,) = asked(project, "add", "c")["changed"]
    assert change == {"what": "member c", "now": "there", "was": "not there"}
    wait_for(lambda: len(epochs(project, "c")) > 1)
    asked(project, "drop", "duo-001", "b")
    wait_for(lambda: ended(project, "b"))
    assert states(project) == {"a": "training", "c": "training"}
    # The file still has it, and it comes back only by its name.
    asked(project, "add")
    wait_for(lambda: states(project) == {"a": "training", "c": "training", "d": "training"})
    done = len(epochs(project, "b"))
    asked(project, "drop", "d")
    asked(project, "add", "b")
    wait_for(lambda: len(epochs(project, "b")) > done)
    for member in ("a", "b", "c"):
        trained = epochs(project, member)
        assert trained == list(dict.fromkeys(trained))
    assert starts(project, "a") == starts(project, "c") == 1
    requests = read_events(project.home.run("duo-001").events_of("_requests"))
    told = [(e.data["want"], e.data["member"], e.data["edits"]) for e in requests]
    assert told == [("add", "c", 1), ("drop", "b", 2), ("add", "d", 3), ("drop", "d", 4), ("add", "b", 5)]


def test_a_stop_rule_changes_for_members_in_training(begin):
    project = begin(a=LIMITED, b=LIMITED, c=ENDLESS)
    wait_for(lambda: epochs(project, "a") and epochs(project, "b"))
    (change,) = asked(project, "change", "duo-001", "a", "--max-epochs", "1")["changed"]
    assert change == {"what": "max_epochs of a", "now": 1, "was": 5000}
    wait_for(lambda: states(project) == {"a": "converged", "b": "training", "c": "training"})
    done = len(epochs(project, "a"))
    asked(project, "change", "a", "b", "--max-epochs", f"{done + 3}")
    wait_for(lambda: states(project)["a"] == "converged" and len(epochs(project, "a")) == done + 3)
    # One beyond a lower limit is done as soon as it has stopped; one that nobody asked about goes on.
    wait_for(lambda: states(project)["b"] == "converged")
    assert starts(project, "c") == 1


def test_edits_count_after_the_driver_and_the_command_were_killed(begin, monkeypatch):
    project = begin(**MEMBERS)
    wait_for(lambda: epochs(project, "a"))
    write(project, **MEMBERS, c=ENDLESS)
    monkeypatch.setattr(edit_run, "write_requests", lambda *_, **__: _be_killed())
    with pytest.raises(Killed):
        project.here("add")
    monkeypatch.undo()
    assert states(project)["c"] == "waiting"
    # The next command tells the driver of it.
    asked(project, "change", "--retries", "5")
    wait_for(lambda: epochs(project, "c"))
    os.kill(driver_of(project.home.run("duo-001").path).pid, signal.SIGKILL)
    done = len(epochs(project, "c"))
    wait_for(lambda: project.is_over() or len(epochs(project, "c")) > done)
    assert read_spec(project.home.run("duo-001")).retries == 5


class Killed(BaseException):
    """End of a command in its midst."""


def _be_killed():
    raise Killed


def test_a_finished_run_is_edited_and_continued(begin):
    project = begin(2, a=LIMITED, b=LIMITED)
    wait_for(project.is_over)
    write(project, 2, **dict.fromkeys("abc", LIMITED))
    assert "`hetctl submit` continues the run" in asked(project, "add")["reason"]
    assert "has more to train now" in asked(project, "status")["reason"]
    asked(project, "change", "--time", "50m", "--nodes", "1", "--retries", "0")
    said = project.here("submit").stdout
    assert "continues duo-001" in said
    wait_for(project.is_over)
    assert states(project) == dict.fromkeys("abc", "converged")
    spec = read_spec(project.home.run("duo-001"))
    assert (spec.wall_s, spec.gpus, spec.retries) == (3000, spec.site.gpus_per_node, 0)
    asked(project, "drop", "c")
    assert "starts duo-002" in project.here("submit", "--dry-run").stderr
    # Another value in the file is newer than that of a command.
    asked(project, "change", "a", "--max-epochs", "2", code=2)
    asked(project, "change", "a", "--max-epochs", "4")
    shown = project.here("submit", "--dry-run").stderr
    assert "continues duo-001" in shown
    assert "max_epochs of" not in shown
    write(project, 3, **dict.fromkeys("abc", LIMITED))
    assert "max_epochs of a: 3 (was 4)" in project.here("submit", "--dry-run").stderr


def test_a_trial_becomes_a_member_that_no_file_has(tmp_path):
    project = new_project(tmp_path / "project", "", environment={"HETCTL_SITE": "local"})
    shutil.copy(TINY / "searched_script.py", project.path)
    script = {"command": [sys.executable, "searched_script.py", "{learning_rate}", "{width}"]}
    space = {"learning_rate": {"choice": [0.01, 0.1]}, "width": {"choice": [16]}}
    search = {"method": "grid", "space": space, "epochs": 1, "max_gpus": 1}
    stop = {"metric": "loss", "patience": 99, "max_epochs": 2}

    def submit(**ensemble):
        (project.path / "ensemble.yaml").write_text(json.dumps({**script, "stop": stop, **ensemble}))
        assert project.here("submit", "--gpus", "1", "--wait").code == 0

    submit(name="found", search=search)
    first, second = asked(project, "search", "show", "--json")["trials"]
    submit(name="plain", members=[{"name": "own", "config": {"learning_rate": 0.02, "width": 16}}])
    asked(project, "add", "--from-trial", f"found-001:{first['member']}", "--name", "best")
    asked(
        project, "add", "plain-001", "--from-trial", f"found-001:{first['member']}", "--name", "own", code=2
    )
    assert asked(project, "submit", "--wait")["continued"]
    status = asked(project, "status", "plain-001")
    own, best = status["members"]
    assert (own["state"], best["state"], best["config"]) == ("converged", "converged", first["config"])
    assert best["epochs"] == 2 > first["epochs"]
    asked(project, "add", "found-001", "--from-trial", f"found-001:{second['member']}", "--name", "x", code=2)
