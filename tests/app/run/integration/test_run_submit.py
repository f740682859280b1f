"""Runs from job to job, with trainers that only pretend to train."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from itertools import pairwise

import pytest
from machine_speed import scaled
from trainless import DRIVER
from workbench import TIMEOUT_S, alive, pretending, pretending_project, wait_for

LONG_S = 240
"""Limit of the wait for a run of several jobs, in seconds: a loaded machine takes many times as long."""


@pytest.fixture
def start(tmp_path):
    """Make a project whose members are configured; whatever still runs at the end is cancelled."""
    projects = []

    def make(a: str = "{epochs: 2}", b: str = "{epochs: 2}", c: str = "{epochs: 2}"):
        project = pretending_project(tmp_path, pretending(a=a, b=b, c=c))
        assert project.here("profile", "import", "rates.csv").code == 0
        projects.append(project)
        return project

    yield make
    for project in projects:
        project.here("cancel")
        wait_for(lambda project=project: not alive(str(project.path)))
        project.check_runs()


def held(tmp_path, epochs):
    """The configuration of a member that trains two epochs, and the others when it is released."""
    return f"{{epochs: {epochs}, held_after: 2, until: {tmp_path}/released}}"


def release(tmp_path):
    (tmp_path / "released").touch()


def rows(project):
    """All that the catalog holds."""
    with sqlite3.connect(f"file:{project.home.catalog}?mode=ro", uri=True) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {table: database.execute(f"SELECT * FROM {table}").fetchall() for table in tables}


def state(project):
    return project.here("status", "--json").json["state"]


def test_a_run_that_ended_cannot_be_cancelled_and_the_next_one_has_its_own_checkpoints(start):
    project = start()
    done = project.here("submit", "--wait", "--json")
    assert (done.code, done.json["state"]) == (0, "finished")
    assert {m["member"]: m["epochs"] for m in done.json["members"]} == {"a": 2, "b": 2, "c": 2}
    assert project.epochs() == {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    wait_for(lambda: not alive(str(project.path)))
    again = project.here("cancel", "--json")
    assert (again.code, again.json["state"]) == (0, "finished")
    # Everything below the home is private.
    paths = [path for path in project.home.path.rglob("*") if not path.is_symlink()]
    fake = [path for path in paths if "checkpoints" in path.parts]
    assert [path for path in paths if path not in fake and path.stat().st_mode & 0o077] == []
    assert project.home.run("trio-001").job(0).script.exists()
    assert project.here("submit", "--wait").code == 0
    assert project.epochs("trio-002") == {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    folders = project.home.checkpoints.glob("*/a")
    assert {folder.parent.name for folder in folders} == {"trio-001", "trio-002"}


def test_jobs_near_their_limit_submit_the_next_ones(start):
    """Of which the last 10 s are their grace: the jobs' own scripts submit the next ones."""
    long = f"{{epochs: 8, epoch_s: {scaled(0.9)}}}"
    project = start(a=long, b=long)
    assert project.here("submit", "--time", f"{10 + scaled(6):.0f}s").code == 0
    wait_for(lambda: state(project) == "finished", seconds=LONG_S)
    status = project.here("status", "--json").json
    assert len(status["jobs"]) >= 2
    assert project.epochs() == {"a": list(range(1, 9)), "b": list(range(1, 9)), "c": [1, 2]}
    wait_for(lambda: {job["state"] for job in project.here("status", "--json").json["jobs"]} == {"finished"})


def test_a_chain_queues_each_job_behind_the_running_one(start):
    project = start(a="{epochs: 30, epoch_s: 0.6}", b="{epochs: 30, epoch_s: 0.6}", c="{epochs: 2}")
    assert project.here("submit", "--time", "24s", "--chain").code == 0
    wait_for(lambda: state(project) == "finished", seconds=LONG_S)
    wait_for(lambda: not alive(str(project.path)))
    assert project.here("advance").code == 0
    jobs = project.here("status", "--json").json["jobs"]
    assert len(jobs) >= 3
    # The job that ends the run may be over before it has queued another.
    for job, after in [*pairwise(jobs)][:-1]:
        assert after["submitted_at"] < job["ended_at"]
    assert jobs[-1]["state"] in ("cancelled", "finished")
    assert project.epochs() == {"a": list(range(1, 31)), "b": list(range(1, 31)), "c": [1, 2]}
    started = [e.data["job"] for e in project.driver_events() if e.kind == "job_started"]
    assert started == list(range(len(started)))


def test_so_many_jobs_and_no_more(start):
    project = start(a="{epochs: 50, epoch_s: 0.6}")
    done = project.here("submit", "--time", "12s", "--max-jobs", "1", "--wait", "--json")
    assert (done.code, done.json["state"]) == (0, "stopped")
    assert done.json["reason"].startswith("--max-jobs 1 is reached; `hetctl submit` continues the run")
    assert len(done.json["jobs"]) == 1


def test_a_failed_member_shows_its_log_and_the_others_converge(start):
    project = start(b="{fail: true}")
    done = project.here("submit", "--wait", "--retries", "0", "--json")
    assert (done.code, done.error["kind"]) == (5, "members-failed")
    assert done.error["message"] == "1 of 3 members failed: b"
    assert done.json["reason"] == "1 of 3 members failed"
    states = {member["member"]: member["state"] for member in done.json["members"]}
    assert states == {"a": "converged", "b": "failed", "c": "converged"}
    for arguments in (["status"], ["status", "--watch"]):
        shown = project.here(*arguments)
        assert shown.code == 5
        assert "no such layer" in shown.stdout
    assert project.here("status", "--json").error["kind"] == "members-failed"


def test_a_run_whose_jobs_break_down_stalls_and_may_go_on(start):
    project = start()
    works = project.python.read_text()
    line, rest = works.split("\n", 1)
    project.python.write_text(f"{line}\nimport sys\n'{DRIVER}' in sys.argv and sys.exit(3)\n{rest}")
    done = project.here("submit", "--wait", "--json")
    assert (done.code, done.error["kind"], done.json["state"]) == (7, "stalled", "stalled")
    assert "trio-001 is stalled: the last 2 jobs got nothing done: see " in done.error["message"]
    assert done.error["message"].endswith("/job-0001.log")
    assert project.here("status").code == 7
    project.python.write_text(works)
    assert project.here("submit", "--wait").code == 0
    assert project.epochs() == {"a": [1, 2], "b": [1, 2], "c": [1, 2]}


def test_a_submit_beside_another_or_a_run_under_way_is_refused_without_changes(start, tmp_path):
    project = start(*[held(tmp_path, 500)] * 3)
    both = [project.start("submit", "--json") for _ in range(2)]
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes == [0, 6], outputs
    answers = [json.loads(stdout) for stdout, _ in outputs]
    assert [answer["error"]["kind"] for answer in answers if "error" in answer] == ["locked"]
    assert [path.name for path in project.home.runs.glob("*")] == ["trio-001"]
    assert len(rows(project)["runs"]) == len(rows(project)["jobs"]) == 1
    assert not any("Traceback" in stderr for _, stderr in outputs)
    # Nor does one change anything later.
    wait_for(lambda: set(project.epochs()) >= {"a"} or set(project.epochs()) >= {"b", "c"})
    before = rows(project)
    refused = project.here("submit", "--json")
    assert (refused.code, refused.error["kind"]) == (6, "locked")
    assert "under way" in refused.error["message"]
    assert "--new" in refused.error["hint"]
    after = rows(project)
    unchanged = ("ensembles", "plans", "runs")
    assert {name: after[name] for name in unchanged} == {name: before[name] for name in unchanged}
    assert [path.name for path in project.home.runs.glob("*")] == ["trio-001"]


def test_ctrl_c_while_waiting_leaves_the_run_going(start, tmp_path):
    project = start(*[held(tmp_path, 20)] * 3)
    process = project.start("submit", "--wait")
    wait_for(lambda: project.epochs())
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "goes on" in stderr
    assert "Traceback" not in stderr
    before = sum(map(len, project.epochs().values()))
    assert state(project) == "running"
    release(tmp_path)
    wait_for(lambda: sum(map(len, project.epochs().values())) > before)


def test_a_cancelled_run_checkpoints_and_goes_on_where_it_was(start, tmp_path):
    project = start(*[held(tmp_path, 25)] * 3)
    assert project.here("submit").code == 0
    wait_for(lambda: len(project.epochs()) >= 2)
    cancelled = project.here("cancel", "--json")
    assert (cancelled.code, cancelled.json["state"]) == (0, "cancelled")
    (job,) = project.here("status", "--json").json["jobs"]
    assert cancelled.json["reason"].startswith(f"job {job['batch_id']} cancelled; ")
    wait_for(lambda: not alive(str(project.path)))
    assert state(project) == "cancelled"
    assert project.here("cancel", "--json").json["reason"].startswith("no job cancelled; ")
    ended = [event for event in project.driver_events() if event.kind == "task_ended"]
    assert ended
    assert {event.data["exit_code"] for event in ended} == {0}
    assert [e.data["reason"] for e in project.driver_events() if e.kind == "job_ended"] == ["signal"]
    first_part = project.epochs()
    assert all(0 < len(epochs) < 25 for epochs in first_part.values())
    release(tmp_path)
    done = project.here("submit", "--wait", "--json")
    assert (done.code, done.json["state"], done.json["run"]) == (0, "finished", "trio-001")
    assert len(done.json["jobs"]) == 2
    assert project.epochs() == {name: list(range(1, 26)) for name in "abc"}


def test_advance_continues_a_killed_job_without_losing_an_epoch(start, tmp_path):
    project = start(*[held(tmp_path, 12)] * 3)
    job = project.here("submit", "--json").json["job"]["batch_id"]
    wait_for(lambda: len(project.epochs()) >= 2)
    for pid in alive(str(project.home.run("trio-001").path)):
        signal_quietly(pid)
    wait_for(lambda: not alive(str(project.home.run("trio-001").path)))
    wait_for(lambda: state(project) == "between-jobs")
    release(tmp_path)
    advanced = project.here("advance", "--json")
    assert (advanced.code, advanced.json["state"]) == (0, "queued")
    assert advanced.json["job"]["batch_id"] != job
    wait_for(lambda: state(project) == "finished", seconds=LONG_S)
    assert project.epochs() == {name: list(range(1, 13)) for name in "abc"}


def signal_quietly(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
