"""One story, told by every batch system (see batch_benches.py for how to add one)."""

from __future__ import annotations

import os
import runpy

import pytest

from hetctl.cluster.batch.submitit_jobs import has_result
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


def test_a_function_runs_as_a_job(bench):
    (job,) = bench.call(os.makedirs, str(bench.folder / "made"))
    assert bench.batch.find_call(bench.named("call"), 1) == (job,)
    assert bench.batch.find_call(bench.named("other"), 2) == ("", "")
    assert bench.end_of(job).state is JobState.FINISHED
    assert (bench.folder / "made").is_dir()
    assert has_result(bench.folder / "calls", job)
    assert not [p for p in (bench.folder / "calls").glob("*.pkl") if p.stat().st_mode & 0o077]


def test_setup_outranks_the_defaults_of_a_site_in_functions(bench):
    found = bench.folder / "environment"
    (job,) = bench.call(
        os.system,
        f"env >{found}",
        setup=("export NCCL_SOCKET_IFNAME=hsn0", "export NOTE=setup"),
        environment={"NCCL_SOCKET_IFNAME": "hsn0,hsn1", "FI_CXI_ATS": "0", "NOTE": "of the site"},
    )
    assert bench.end_of(job).state is JobState.FINISHED
    lines = found.read_text().splitlines()
    # As in the scripts of runs: the driver sets the defaults for its steps alone.
    assert {"NCCL_SOCKET_IFNAME=hsn0", "NOTE=of the site"} <= set(lines)
    assert not [line for line in lines if line.startswith("FI_CXI_ATS")]


def test_a_function_that_raises_has_failed(bench):
    (job,) = bench.call(os.rmdir, str(bench.folder / "nowhere"))
    assert bench.end_of(job).state is JobState.FAILED
    assert has_result(bench.folder / "calls", job)


def test_a_function_with_several_arguments_is_an_array_of_jobs(bench):
    wanted = [bench.folder / f"made-{index}" for index in range(3)]
    wanted[1].mkdir()  # so that this one fails
    jobs = bench.call(os.makedirs, *map(str, wanted), max_concurrent=1)
    assert len(set(jobs)) == 3
    assert bench.batch.find_call(bench.named("call"), 3) == jobs
    ends = [bench.end_of(job).state for job in jobs]
    assert ends == [JobState.FINISHED, JobState.FAILED, JobState.FINISHED]
    assert all(path.is_dir() for path in wanted)


def test_jobs_of_an_array_run_in_turn_and_are_cancelled_together(bench):
    program = bench.folder / "sleep.py"
    program.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\ntime.sleep(600)\n"
    )
    jobs = bench.call(runpy.run_path, *[str(program)] * 4, max_concurrent=1)
    bench.wait(lambda: bench.status(jobs[0]).state is JobState.RUNNING)
    states = bench.batch.statuses(jobs)
    assert [states[job].state for job in jobs[1:]] == [JobState.PENDING] * 3
    bench.batch.cancel(jobs)
    assert {bench.end_of(job).state for job in jobs} == {JobState.CANCELLED}
