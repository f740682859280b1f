"""Pause, resume, cancel and retry of members, in a running job and between jobs."""

from __future__ import annotations

import pytest
from workbench import asked, cancel_all, pretending, pretending_project, states, wait_for

ENDLESS = "{epochs: 400}"


@pytest.fixture
def begin(tmp_path):
    """Submit a run of three members on two slots; the jobs of it are cancelled at the end."""
    projects = []

    def start(a: str = ENDLESS, b: str = ENDLESS, c: str = ENDLESS, *options: str):
        project = pretending_project(tmp_path, pretending(most_epochs=500, a=a, b=b, c=c))
        projects.append(project)
        assert project.here("profile", "import", "rates.csv").code == 0
        assert project.here("submit", "--gpus", "2", *options).code == 0
        return project

    yield start
    cancel_all(projects)


def test_a_member_leaves_a_running_job_and_returns_without_a_restart_of_others(begin):
    project = begin()
    wait_for(lambda: set(project.epochs()) >= {"a", "b"})
    assert asked(project, "pause", "a")["members"] == ["a"]
    wait_for(lambda: states(project) == {"a": "paused", "b": "training", "c": "training"})
    done = len(project.epochs()["a"])
    asked(project, "cancel", "trio-001", "b")
    wait_for(lambda: states(project)["b"] == "cancelled")
    assert asked(project, "resume", "a", "b")["state"] in ("queued", "running")
    wait_for(lambda: len(project.epochs()["a"]) > done + 1)
    # Nothing was trained twice, and the one that nobody asked about was started once.
    trained = project.epochs()["a"]
    assert trained == list(dict.fromkeys(trained))
    starts = [e for e in project.driver_events() if e.kind == "task_started" and e.data["member"] == "c"]
    assert len(starts) == 1


REFUSED = {
    ("pause", "b"): "b is converged; hetctl pause is for members that are active or paused",
    ("retry", "a"): "a is active",
    ("pause", "a", "nobody"): "run trio-001 has no member nobody",
    ("resume", "trio-001"): "no member of run trio-001 is named",
    ("cancel", "nobody"): "no run 'nobody' in the catalog",
}


def test_a_run_ends_without_paused_members_and_is_continued_with_them(begin):
    """What does not apply to all members is refused whole, before."""
    project = begin(b="{epochs: 2}", c="{epochs: 2}")
    wait_for(lambda: states(project)["b"] == "converged")
    for arguments, said in REFUSED.items():
        assert said in asked(project, *arguments, code=2)["error"]["message"]
        assert not project.home.run("trio-001").events_of("_requests").exists(), arguments
    asked(project, "pause", "a")
    ended = wait_for(lambda: (s := project.here("status", "--json").json)["state"] == "stopped" and s)
    assert "1 of 3 members paused" in ended["reason"]
    asked(project, "cancel", "a")
    assert asked(project, "submit")["state"] == "finished"
    assert states(project) == {"a": "cancelled", "b": "converged", "c": "converged"}
    assert asked(project, "resume", "a")["state"] == "finished"
    assert asked(project, "submit")["state"] == "queued"
    wait_for(lambda: states(project)["a"] == "training")


def test_a_failed_member_is_tried_again_in_the_running_job(begin):
    project = begin("{epochs: 400, kill_after: 1}", ENDLESS, "{epochs: 1}", "--retries", "0")
    wait_for(lambda: states(project)["a"] == "failed")
    asked(project, "retry", "a")
    wait_for(lambda: len(project.epochs()["a"]) > 2)
    assert states(project)["a"] == "training"
