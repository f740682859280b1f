"""Runs on a file system that does not answer for seconds, as when a server of Lustre or NFS fails over."""

from __future__ import annotations

import errno
import time

import pytest
from disk_faults import Faults
from driven_job import Job
from workbench import alive, new_project, pretending, pretending_project, wait_for

OUTAGE_S = 8.0


@pytest.fixture
def faults(tmp_path):
    return Faults(tmp_path)


def hit(faults, *names):
    return wait_for(lambda: any(name in faults.hits() for name in names))


def test_an_outage_ends_neither_job_nor_member(tmp_path, faults):
    """First of ``run.json``, then of the driver's events, and of one member's at fsync(2)."""
    config = {"epochs": 3, "epoch_s": 0.3, "held_after": 1, "until": str(tmp_path / "gate")}
    job = Job(tmp_path, dict.fromkeys("abc", config), wall_s=600)
    faults.begin(600, (errno.ESTALE, "all", "run.json"))
    driver = job.start(**faults.environment)
    hit(faults, "open run.json", "stat run.json")
    faults.begin(0)
    wait_for(lambda: job.trained("a") and job.trained("b"))
    began = time.monotonic()
    faults.begin(
        OUTAGE_S, (errno.ESTALE, "all", "events/driver.jsonl"), (errno.EIO, "fsync", "events/a.jsonl")
    )
    (tmp_path / "gate").touch()
    output, _ = driver.communicate(timeout=120)
    assert (driver.returncode, job.reason) == (0, "finished"), output
    job.leaves_nothing_behind()
    assert time.monotonic() - began > OUTAGE_S
    assert faults.hits()["fsync a.jsonl"]
    assert faults.hits()["open driver.jsonl"]
    assert "nothing is started until the disk answers" in output
    assert "Traceback" not in output
    assert all(job.trained(name) == [1, 2, 3] for name in "abc")
    assert {event.data["reason"] for event in job.events("task_ended")} <= {"finished", "told"}
    assert all(progress.failures == 0 for progress in job.progress().values())


def test_an_outage_during_a_command_is_no_wrong_input(tmp_path, faults):
    project = new_project(tmp_path / "project", environment={"HETCTL_SITE": "local"})
    assert project.here("profile", "import", "rates.csv").code == 0
    faults.begin(600, (errno.ESTALE, "all", "record.json"))
    refused = project.hetctl("submit", "--json", **faults.environment)
    assert (refused.code, refused.error["kind"]) == (8, "disk")
    assert project.here("status").code == 2


def test_an_outage_does_not_break_the_chain_of_jobs(tmp_path, faults):
    """Of the catalog, then of the driver's events, while the job's script advances the run."""
    config = f"{{epochs: 2, held_after: 1, until: {tmp_path}/gate}}"
    project = pretending_project(tmp_path, pretending(a=config))
    (project.path / "rates.csv").write_text("member,gpus,rate,samples\na,1,100,400\n")
    assert project.here("profile", "import", "rates.csv").code == 0
    assert project.hetctl("submit", **faults.environment).code == 0
    wait_for(lambda: project.epochs().get("a"))
    faults.begin(600, (errno.ESTALE, "all", "catalog.db"))
    (tmp_path / "gate").touch()
    hit(faults, "open catalog.db", "stat catalog.db")
    faults.begin(600, (errno.EIO, "open", "events/driver.jsonl"))
    hit(faults, "open driver.jsonl")
    faults.begin(2.0, (errno.ESHUTDOWN, "all", ".hetctl"))
    wait_for(lambda: not alive(str(project.path)))
    status = project.here("status", "--json").json
    log = "".join(path.read_text() for path in project.home.runs.glob("*/job-*.log"))
    assert (status["state"], project.epochs()) == ("finished", {"a": [1, 2]}), log
    assert "internal error" not in log
    assert "Traceback" not in log


def test_a_command_says_that_the_disk_does_not_answer(tmp_path, faults):
    project = new_project(tmp_path / "project", environment={"HETCTL_SITE": "local"} | faults.environment)
    faults.begin(600, (errno.ESTALE, "all", "ensemble.yaml"))
    result = project.hetctl("plan", "--json")
    assert (result.code, result.error["kind"]) == (8, "disk")
    assert "does not answer" in result.error["hint"]
