"""One story, told by every batch system (see batch_benches.py for how to add one)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.model.errors import BatchSystemError
from hetctl.model.job import JobState

WAIT_FOR = "while [ ! -e {} ]; do sleep 0.1; done"


def test_a_job_is_submitted_runs_and_finishes(bench):
    leave = bench.folder / "leave"
    job = bench.submit("story", f"touch {bench.folder}/started; {WAIT_FOR.format(leave)}")
    assert bench.status(job).state in {JobState.PENDING, JobState.RUNNING}
    bench.wait((bench.folder / "started").exists)
    bench.wait(lambda: bench.status(job).state is JobState.RUNNING)
    assert bench.status(job).exit_code is None
    leave.touch()
    end = bench.end_of(job)
    assert (end.state, end.exit_code, end.failed_nodes) == (JobState.FINISHED, 0, ())


def test_many_jobs_are_queried_at_once_with_their_own_ends(bench):
    fine = bench.submit("fine", "exit 0")
    failing = bench.submit("failing", "exit 7")
    killed = bench.submit("killed", "kill -KILL $$")
    running = bench.submit("running", "sleep 600")
    jobs = [fine, failing, killed, running]
    bench.wait(lambda: sum(s.state.over for s in bench.batch.statuses(jobs).values()) == 3)
    bench.wait(lambda: bench.status(running).state is JobState.RUNNING)
    ends = bench.batch.statuses(jobs)
    assert {job: (end.state, end.exit_code) for job, end in ends.items()} == {
        fine: (JobState.FINISHED, 0),
        failing: (JobState.FAILED, 7),
        killed: (JobState.FAILED, 137),
        running: (JobState.RUNNING, None),
    }
    assert ends[killed].reason


def test_a_cancelled_job_is_cancelled_and_has_stopped(bench):
    beat = bench.folder / "beat"
    job = bench.submit("cancelled", f"while true; do date +%s%N >{beat}; sleep 0.1; done")
    bench.wait(lambda: beat.exists() and beat.read_text())
    bench.batch.cancel([job])
    assert bench.end_of(job).state is JobState.CANCELLED
    last = beat.read_text()
    bench.batch.cancel([job])  # once more is no error
    assert beat.read_text() == last
    assert bench.status(job).state is JobState.CANCELLED


def test_a_job_that_reaches_its_limit_has_timed_out(bench):
    script = f"touch {bench.folder}/started; sleep 600"
    job = bench.submit("limit", script, wall_s=bench.short_wall_s)
    bench.wait((bench.folder / "started").exists)
    bench.reach_limit(job)
    end = bench.end_of(job)
    assert (end.state, bool(end.reason)) == (JobState.TIMEOUT, True)


def test_a_job_starts_after_its_predecessor_however_that_ends(bench):
    leave, order = bench.folder / "leave", bench.folder / "order"
    first = bench.submit("first", f"{WAIT_FOR.format(leave)}; echo first >>{order}; exit 3")
    second = bench.submit("second", f"echo second >>{order}", after=first)
    bench.wait(lambda: bench.status(first).state is JobState.RUNNING)
    assert bench.status(second).state is JobState.PENDING
    leave.touch()
    assert bench.end_of(second).state is JobState.FINISHED
    assert bench.status(first).exit_code == 3
    assert order.read_text().split() == ["first", "second"]


def test_a_job_that_waits_for_another_can_be_cancelled(bench):
    first = bench.submit("first", "sleep 600")
    second = bench.submit("second", f"touch {bench.folder}/ran", after=first)
    bench.wait(lambda: bench.status(second).state is JobState.PENDING)
    bench.batch.cancel([second])
    end = bench.end_of(second)
    assert (end.state, end.exit_code) == (JobState.CANCELLED, None)
    assert not bench.status(first).state.over
    assert not (bench.folder / "ran").exists()


def test_jobs_are_found_by_their_names_dead_or_alive(bench):
    over, alive = bench.submit("over", "exit 1"), bench.submit("alive", "sleep 600")
    bench.end_of(over)
    names = [bench.named(name) for name in ("over", "alive", "never", "ove")]
    assert bench.batch.find(names) == {names[0]: over, names[1]: alive}
    assert bench.batch.find(names[2:]) == {}


def test_an_unknown_job_is_reported_beside_a_known_one(bench):
    known = bench.submit("known", "exit 0")
    bench.end_of(known)
    states = bench.batch.statuses([known, "99999999"])
    assert {job: status.state for job, status in states.items()} == {
        known: JobState.FINISHED,
        "99999999": JobState.UNKNOWN,
    }
    assert bench.status("99999999").state is JobState.UNKNOWN


def test_nothing_is_asked_about_no_jobs(bench):
    assert (bench.batch.statuses([]), bench.batch.find([])) == ({}, {})
    bench.batch.cancel([])


def test_a_script_that_cannot_be_submitted_is_a_clear_error(bench):
    request = bench.request("gone", "exit 0")
    request.script.unlink()
    with pytest.raises(BatchSystemError, match=request.script.name):
        bench.batch.submit(request)
    assert bench.batch.find([request.name]) == {}


def test_a_job_submitted_by_submitit_is_one_like_any_other(bench):
    request = replace(bench.request("by-submitit", "exit 0"), submitit=bench.folder / "submitit")
    job = bench.batch.submit(request)
    bench.jobs.append(job)
    assert bench.end_of(job).state is JobState.FINISHED
    assert bench.batch.find([request.name]) == {request.name: job}
