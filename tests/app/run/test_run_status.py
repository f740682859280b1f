"""Looking at a run: it changes nothing, and what has ended has ended, whatever the batch system says."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace

import click
import pytest
from workbench import TIMEOUT_S, Kept, alive, pretending, pretending_project, wait_for

from hetctl.app.project import Project, Waits
from hetctl.app.run import status as looking
from hetctl.app.run.job_states import ended_by_files
from hetctl.app.run.select_run import record_of
from hetctl.catalog.catalog import Catalog
from hetctl.catalog.lock import ProjectLock
from hetctl.cli.watch import follow
from hetctl.cluster.batch.local import LocalBatch
from hetctl.model.errors import BatchSystemError
from hetctl.model.events import Event
from hetctl.model.job import Job, JobState, JobStatus
from hetctl.model.site import Purge
from hetctl.storage.progress_fold import events_in
from hetctl.storage.purge import DAY_S

ENSEMBLE = pretending(a="{epochs: 2}", b="{epochs: 2}")
RUN = "trio-001"
QUICK = Waits(settle_s=0.1, run_poll_s=0.05)
LOOKS = [["status"], ["status", "--json"], ["report", "-o", "/dev/null"], ["profile", "show"]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A project after its run."""
    made = pretending_project(tmp_path_factory.mktemp("ended"), ENSEMBLE, waits=QUICK)
    (made.path / "rates.csv").write_text("member,gpus,rate,samples\na,1,100,400\nb,1,100,400\n")
    assert made.here("profile", "import", "rates.csv").code == 0
    assert made.here("submit", "--wait").code == 0
    wait_for(lambda: job_states(made) == ["finished"] and not alive(str(made.path)))
    return Kept(made)


@pytest.fixture
def project(ended):
    return ended.restored()


@pytest.fixture
def finished(project):
    """The same, but the catalog has not seen its last job end."""
    save_last_job(project, JobState.PENDING)
    return project


@pytest.fixture
def silence(monkeypatch):
    """Have the batch system give no answer."""

    def begin():
        def none(*_):
            raise BatchSystemError("squeue is not on the PATH of this machine")

        monkeypatch.setattr(LocalBatch, "statuses", none)

    return begin


def save_last_job(project, state, **fields):
    """Have the catalog remember the last job so; return it."""
    with Catalog.open(project.home.catalog) as catalog:
        job = replace(catalog.jobs(RUN)[-1], state=state, ended_at=None, **fields)
        catalog.save_job(RUN, job)
    return job


def record_and_jobs(project):
    with Catalog.open_to_read(project.home.catalog) as catalog:
        return record_of(catalog, RUN), catalog.jobs(RUN)


def job_states(project):
    return [job["state"] for job in project.here("status", "--json").json["jobs"]]


def purge_in(project, **fields):
    """Have the run's site delete files of the project after ten days."""
    purge = Purge(10, (f"{project.path}/*",), **fields)
    with Catalog.open(project.home.catalog) as catalog:
        spec = record_of(catalog, RUN).spec
        catalog.save_spec(replace(spec, site=replace(spec.site, purge=purge)))


def cut_short(project):
    """Leave a run as a crash between the entry of its job and the call of the batch system does."""
    save_last_job(project, JobState.SUBMITTING, batch_id="")
    with Catalog.open(project.home.catalog) as catalog:
        catalog.set_run_state(RUN, "queued")


def remove_claims(project):
    """Have neither the batch system nor the run know of the job."""
    for path in [*project.home.run(RUN).path.glob("*.claim"), *project.home.path.glob("local-jobs/*")]:
        path.unlink()


@pytest.mark.parametrize("arguments", LOOKS)
def test_looking_at_a_job_in_doubt_neither_submits_nor_writes(project, arguments, monkeypatch):
    cut_short(project)
    remove_claims(project)
    monkeypatch.setattr(LocalBatch, "submit", lambda *_: pytest.fail("submitted"))
    monkeypatch.setattr(LocalBatch, "find", lambda *_: pytest.fail("asked for the job"))
    monkeypatch.setattr(ProjectLock, "__enter__", lambda *_: pytest.fail("locked"))
    before = project.tree()
    assert project.here(*arguments).code == 0
    assert project.tree() == before


def test_a_job_in_doubt_is_shown_as_in_doubt_with_the_next_step(project):
    cut_short(project)
    shown = project.here("status", "--json").json
    assert (shown["state"], [job["state"] for job in shown["jobs"]]) == ("in-doubt", ["submitting"])
    assert "hetctl advance" in shown["reason"]
    assert "submitting" in project.here("status").stdout


def test_status_names_the_day_from_which_the_site_deletes_unused_files(project):
    purge_in(project)
    week_ago = time.time() - 7 * DAY_S
    old = project.home.run(RUN).events_of("a")
    os.utime(old, (week_ago, week_ago))
    # The files of a run that is younger are not asked for.
    assert project.here("status", "--json").json["warnings"] == []
    with closing(sqlite3.connect(project.home.catalog)) as database, database:
        database.execute("UPDATE runs SET created_at = ?", (week_ago,))
    day = time.strftime("%Y-%m-%d", time.localtime(week_ago + 10 * DAY_S))
    assert f"of this run from {day} on" in "".join(project.here("status", "--json").json["warnings"])
    assert day in project.here("status").stdout
    purge_in(project, touch=True)
    assert project.here("advance").code == 0
    assert project.here("status", "--json").json["warnings"] == []
    assert old.stat().st_mtime == pytest.approx(week_ago, abs=1)


@pytest.mark.parametrize("command", ["advance", "submit"])
def test_what_is_in_doubt_is_found_out_by_commands_that_submit(project, command):
    cut_short(project)
    assert (
        project.here(command, "--json").json["reason"].endswith("is found: its submission had been cut short")
    )
    assert record_and_jobs(project)[1][0].batch_id


def test_watching_a_run_in_doubt_changes_nothing(project, monkeypatch):
    cut_short(project)
    looks = []
    stored = looking.RunWatch._stored

    def counted(watch):
        looks.append(stored(watch)[1][-1].state)
        if len(looks) == 3:
            with Catalog.open(project.home.catalog) as catalog:
                catalog.set_run_state(RUN, "cancelled")
        return stored(watch)

    monkeypatch.setattr(looking.RunWatch, "_stored", counted)
    assert project.here("status", "--watch").code == 0
    assert looks[:3] == [JobState.SUBMITTING] * 3


def test_waiting_for_a_run_finds_out_what_is_in_doubt(project, monkeypatch):
    cut_short(project)
    monkeypatch.chdir(project.path)
    command = click.Command("wait", callback=lambda: follow(Project.here(QUICK), RUN, advancing=True))
    waiting = threading.Thread(target=command.main, args=([],), kwargs={"standalone_mode": False})
    waiting.start()
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()
    record, jobs = record_and_jobs(project)
    assert (record.state, bool(jobs[0].batch_id)) == ("finished", True)


def test_behind_a_running_job_the_next_one_may_be_in_doubt(project):
    record, (job,) = submitted_long_ago(project)
    running = replace(job, state=JobState.RUNNING, batch_id="7")
    doubtful = replace(job, number=1, batch_id="", state=JobState.SUBMITTING)
    started = Event("driver", 0, "job_started", 0.0, {"job": 0})
    state, reason = looking._state(record, [running, doubtful], [started])
    assert (state, reason.startswith("job 7, job 1")) == ("running", True)


def submitted_long_ago(project):
    cut_short(project)
    return record_and_jobs(project)


def test_a_finished_run_takes_no_longer_without_batch_system(finished, silence):
    before = finished.here("status", "--json").json
    silence()
    after = finished.here("status", "--json").json
    assert after["measured_s"] == before["measured_s"]
    assert (after["state"], after["reason"]) == ("finished", "every member has converged")
    assert [job["state"] for job in after["jobs"]] == ["finished"]
    (ended_at,) = [one.time for one in events_in(finished.home.run(RUN)) if one.kind == "job_ended"]
    assert after["jobs"][0]["ended_at"] == ended_at
    assert all(task["end_s"] is not None for task in after["tasks"])
    assert record_and_jobs(finished)[1][0].state is JobState.PENDING


def test_an_unknown_run_is_refused_with_the_known_ones(finished):
    assert "trio-001" in finished.here("status", "trio-007", "--json").error["message"]


def test_a_run_stored_as_running_ends_with_its_last_job(finished, silence):
    """The job could not tell the catalog: its events alone say that it has ended."""
    # While the job's script ends, the batch system says that it runs, and a running run lasts until now.
    before = finished.here("status", "--json").json["measured_s"]
    with Catalog.open(finished.home.catalog) as catalog:
        catalog.set_run_state(RUN, "running")
    silence()
    shown = finished.here("status", "--json").json
    assert (shown["state"], shown["measured_s"]) == ("between-jobs", before)
    assert [job["state"] for job in shown["jobs"]] == ["finished"]
    assert "squeue" in shown["reason"]


def test_a_finished_run_takes_no_longer_while_its_job_ends(finished, monkeypatch):
    """Until the script has ended, the batch system says that the job runs, although its work is over."""
    before = finished.here("status", "--json").json["measured_s"]
    monkeypatch.setattr(
        looking,
        "current_jobs",
        lambda jobs, *_, **__: tuple(replace(j, state=JobState.RUNNING) for j in jobs),
    )
    shown = finished.here("status", "--json").json
    assert (shown["measured_s"], shown["jobs"][0]["state"]) == (before, "finished")


TIMED_OUT = JobState.TIMEOUT
JOB = Job(3, "hetctl-x", "77", JobState.PENDING, 1, 60, 0.0)


def event(kind, at, **data):
    return Event("driver", 0, kind, at, {"job": 3, **data})


STARTED, ENDED = event("job_started", 1.0), event("job_ended", 9.0, reason="deadline")
LATER = Event("a", 0, "epoch", 12.0, {})


@pytest.mark.parametrize(
    ("job", "events", "done", "silent", "state", "ended_at"),
    [
        (JOB, (STARTED, ENDED, LATER), False, True, JobState.FINISHED, 9.0),
        (JOB, (STARTED, ENDED, event("job_started", 11.0), LATER), False, True, JobState.PENDING, None),
        (JOB, (STARTED, LATER), True, True, JobState.FINISHED, 12.0),
        (JOB, (STARTED, LATER), False, True, JobState.PENDING, None),
        (JOB, (LATER,), True, True, JobState.PENDING, None),
        (JOB, (STARTED, ENDED), True, False, JobState.PENDING, None),
        (replace(JOB, state=JobState.UNKNOWN), (STARTED, LATER), True, False, JobState.FINISHED, 12.0),
        (replace(JOB, state=TIMED_OUT, ended_at=5.0), (STARTED, ENDED), True, True, TIMED_OUT, 5.0),
        (replace(JOB, number=4), (STARTED, ENDED), False, True, JobState.PENDING, None),
    ],
)  # fmt: skip
def test_what_the_files_prove_of_a_job(job, events, done, silent, state, ended_at):
    (found,) = ended_by_files([job], events, done=done, silent=silent)
    assert (found.state, found.ended_at) == (state, ended_at)


def test_a_list_reads_no_members_of_a_running_job(project, monkeypatch):
    save_last_job(project, JobState.RUNNING)
    with Catalog.open(project.home.catalog) as catalog:
        catalog.set_run_state(RUN, "running")
    before = project.here("runs", "--json").json["runs"][0]["results"]
    # The driver goes on: its results are those of the last snapshot.
    with project.home.run(RUN).events_of("driver").open("a") as file:
        file.write(
            '{"kind": "job_started", "time": 3e9, "round": 9, "job": 0, "batch_id": "1", "nodes": []}\n'
        )
    state = JobState.RUNNING
    monkeypatch.setattr(LocalBatch, "statuses", lambda _, ids: {each: JobStatus(state) for each in ids})
    with monkeypatch.context() as patch:
        patch.setattr(looking, "state_in", lambda *_: pytest.fail("all members are read"))
        (line,) = project.here("runs", "--json").json["runs"]
    assert (line["state"], line["results"]) == ("running", before)
    state = JobState.FINISHED
    (line,) = project.here("runs", "--json").json["runs"]
    assert line["results"]["event_bytes"] > before["event_bytes"]
