"""Local jobs, with real processes: started, held to their limit, cancelled, and nothing left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetctl.batch.base import FunctionCall
from hetctl.batch.functions import has_result
from hetctl.batch.local import LocalBatch
from hetctl.core.job import JobState
from hetctl.core.site import Queue, Site

SITE = Site("local", "local", "local", 1, 2, 2, 2**30, (Queue("local"),), device="slot")
IMPATIENT = """
import sys
from hetctl.batch import supervisor
supervisor.CANCEL_GRACE_S = 0.5
sys.exit(supervisor.main())
"""


@pytest.fixture
def batch(tmp_path):
    return LocalBatch(tmp_path / "jobs")


@pytest.fixture
def submit(tmp_path, batch):
    """Submit a script; whatever a test leaves running is killed."""
    jobs = []

    def submit_script(text, wall_s=60):
        (tmp_path / "logs").mkdir(exist_ok=True)
        script = tmp_path / "job.sh"
        script.write_text(text)
        jobs.append(batch.submit(script, [], wall_s))
        return jobs[-1]

    yield submit_script
    batch.cancel(jobs)
    for job in jobs:
        wait_for(lambda job=job: batch.states([job])[job].over)


def wait_for(condition, seconds=10.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.05)


def end_of(batch, job):
    wait_for(lambda: batch.states([job])[job].over)
    return batch.states([job])[job]


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def pid_in(path):
    wait_for(lambda: path.exists() and path.read_text().strip())
    return int(path.read_text())


def test_a_script_runs_to_its_end_with_its_output_in_the_log(batch, submit, tmp_path):
    job = submit("echo to-stdout; echo to-stderr >&2")
    assert end_of(batch, job) is JobState.FINISHED
    assert set((tmp_path / "logs" / "job.log").read_text().split()) == {"to-stdout", "to-stderr"}
    end = json.loads((tmp_path / "jobs" / f"{job}.json").read_text())
    assert end == {"exit_code": 0, "ended_by": None}


def test_a_failing_script_has_failed_and_its_exit_code_is_kept(batch, submit, tmp_path):
    job = submit("exit 7")
    assert end_of(batch, job) is JobState.FAILED
    assert json.loads((tmp_path / "jobs" / f"{job}.json").read_text())["exit_code"] == 7


def test_a_running_job_is_running_and_then_cancelled(batch, submit, tmp_path):
    job = submit(f"trap 'echo bye >{tmp_path}/bye; exit 0' TERM; echo $$ >{tmp_path}/pid; sleep 60 & wait")
    pid = pid_in(tmp_path / "pid")
    assert batch.states([job]) == {job: JobState.RUNNING}
    batch.cancel([job])
    assert end_of(batch, job) is JobState.CANCELLED
    assert (tmp_path / "bye").read_text() == "bye\n"
    assert not is_running(pid)


def test_the_script_is_told_first_and_its_steps_by_the_script(batch, submit, tmp_path):
    step = f"trap 'echo told >{tmp_path}/told' TERM; while [ ! -e {tmp_path}/leave ]; do sleep 0.05; done"
    (tmp_path / "step.sh").write_text(f"{step}; echo done >{tmp_path}/step-done")
    script = f"""
bash {tmp_path}/step.sh & step=$!
trap 'touch {tmp_path}/leave' TERM
touch {tmp_path}/ready
wait $step; wait $step
"""
    job = submit(script)
    wait_for((tmp_path / "ready").exists)
    batch.cancel([job])
    assert end_of(batch, job) is JobState.CANCELLED
    assert (tmp_path / "step-done").exists()
    assert not (tmp_path / "told").exists()


def test_the_wall_clock_limit_ends_a_job_and_all_its_processes(batch, submit, tmp_path):
    job = submit(f"sleep 60 & echo $! >{tmp_path}/pid; wait", wall_s=1)
    pid = pid_in(tmp_path / "pid")
    assert end_of(batch, job) is JobState.TIMEOUT
    assert not is_running(pid)


def test_a_script_that_ignores_its_limit_is_killed_after_the_grace(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(f"trap '' TERM; echo $$ >{tmp_path}/pid; while true; do sleep 0.1; done")
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    began = time.monotonic()
    supervisor = subprocess.Popen([sys.executable, "-c", IMPATIENT, jobs, "0.3", script])
    supervisor.wait(timeout=10)
    assert 0.8 <= time.monotonic() - began < 8
    end = json.loads((jobs / f"{supervisor.pid}.json").read_text())
    assert end == {"exit_code": -signal.SIGKILL, "ended_by": "timeout"}
    assert not is_running(pid_in(tmp_path / "pid"))


def test_what_a_finished_script_left_running_is_killed(batch, submit, tmp_path):
    job = submit(f"sleep 60 & echo $! >{tmp_path}/pid; exit 0")
    assert end_of(batch, job) is JobState.FINISHED
    assert not is_running(pid_in(tmp_path / "pid"))


def test_cancelling_what_is_over_is_no_error(batch, submit):
    job = submit("exit 0")
    end_of(batch, job)
    batch.cancel([job])
    assert batch.states([job])[job] is JobState.FINISHED


def test_a_supervisor_that_died_without_a_word_is_a_failed_job(batch, submit, tmp_path):
    job = submit(f"echo $$ >{tmp_path}/pid; sleep 60")
    script = pid_in(tmp_path / "pid")
    os.kill(int(job), signal.SIGKILL)
    assert end_of(batch, job) is JobState.FAILED
    os.killpg(script, signal.SIGKILL)


def test_the_end_of_an_earlier_job_with_the_same_number_is_not_taken_for_this_one(tmp_path, monkeypatch):
    batch, real = LocalBatch(tmp_path / "jobs"), subprocess.Popen
    (tmp_path / "logs").mkdir()
    (tmp_path / "jobs").mkdir()
    script = tmp_path / "job.sh"
    script.write_text("sleep 60")

    def popen_with_a_used_number(*arguments, **options):
        process = real(*arguments, **options)
        old_end = {"exit_code": 0, "ended_by": None}
        (tmp_path / "jobs" / f"{process.pid}.json").write_text(json.dumps(old_end))
        return process

    monkeypatch.setattr(subprocess, "Popen", popen_with_a_used_number)
    job = batch.submit(script, [], 60)
    assert batch.states([job]) == {job: JobState.RUNNING}
    os.kill(int(job), signal.SIGKILL)


def test_a_process_that_ends_between_two_looks_is_not_taken_for_dead(batch, tmp_path, monkeypatch):
    """Its end is written just after it was looked for, and then it is gone."""
    (tmp_path / "jobs").mkdir()

    def ends_now(_pid):
        (tmp_path / "jobs" / "4711.json").write_text('{"exit_code": 0, "ended_by": null}')
        return False

    monkeypatch.setattr("hetctl.batch.local._is_alive", ends_now)
    assert batch.states(["4711"]) == {"4711": JobState.FINISHED}


def double(text):
    return f"{text}{text}"


def boom(text):
    raise ValueError(text)


@pytest.mark.parametrize("function", [double, boom])
def test_a_function_runs_as_a_job_and_its_end_is_seen(function, batch, tmp_path):
    call = FunctionCall(function, "x", tmp_path / "calls", "name", SITE, SITE.queues[0], 1, 60)
    job = batch.call(call)
    assert not has_result(tmp_path / "calls", job)
    wait_for(lambda: has_result(tmp_path / "calls", job))
    assert (tmp_path / "calls").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "calls").glob("*.pkl"))
