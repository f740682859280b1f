"""Local jobs, with real processes: each runs once, is held to its limit, and nothing of it is left."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from workbench import wait_for

from hetctl.cluster.batch.base import JobRequest
from hetctl.cluster.batch.local import (
    Claim,
    End,
    LocalBatch,
    claim,
    claim_file,
    end_file,
    read_claim,
    read_end,
)
from hetctl.model.errors import BatchSystemError, DamagedFileError
from hetctl.model.job import JobState
from hetctl.model.serialization import encode
from hetctl.model.site import Queue, Site
from hetctl.storage.atomic_io import write_json
from hetctl.storage.processes import HostBoot, Process

SITE = Site("s", "local", "local", 1, 3, 3, 2**30, (Queue("q"),), device="slot")
SLOTS = ("--gpus=1", "--of=3", "--device=slot")
SUBMITTER = """
import os, signal, subprocess, sys
from pathlib import Path
from hetctl.cluster.batch.base import JobRequest
from hetctl.cluster.batch.local import LocalBatch
from hetctl.model.site import Queue, Site
class KilledAtOnce(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[4] == "kill":
    subprocess.Popen = KilledAtOnce
SITE = Site("s", "local", "local", 1, 2, 2, 2**30, (Queue("q"),), device="slot")
LocalBatch(Path(sys.argv[1])).submit(JobRequest(sys.argv[2], Path(sys.argv[3]), (), 60, SITE, 1))
"""
IMPATIENT = """
import sys
from hetctl.cluster.batch import supervisor
sys.exit(supervisor.main(cancel_grace_s=0.5))
"""


@pytest.fixture
def batch(tmp_path, monkeypatch):
    monkeypatch.setenv("HETCTL_SLOT_LOCKS", str(tmp_path / "locks"))
    return LocalBatch(tmp_path / "jobs")


@pytest.fixture
def submit(tmp_path, batch):
    """Submit a script; whatever a test leaves running is ended."""
    jobs = []

    def submit_script(text, wall_s=60, gpus=1, after=None):
        jobs.append(f"job-{len(jobs)}")
        return batch.submit(JobRequest(jobs[-1], script_of(tmp_path, text), (), wall_s, SITE, gpus, after))

    yield submit_script
    batch.cancel(jobs)
    for job in jobs:
        wait_for(lambda job=job: state_of(batch, job) is JobState.UNKNOWN or state_of(batch, job).over)


def script_of(folder, text):
    script = folder / f"{time.monotonic_ns()}.sh"
    script.write_text(text)
    return script


def state_of(batch, job):
    return batch.statuses([job])[job].state


def end_of(batch, job):
    wait_for(lambda: state_of(batch, job).over)
    return batch.statuses([job])[job]


def is_locked(path):
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def process_in(path):
    wait_for(lambda: path.exists() and path.read_text().strip())
    return Process.of(int(path.read_text()))


def test_the_output_of_a_script_is_in_the_log(batch, submit, tmp_path):
    job = submit("echo to-stdout; echo to-stderr >&2")
    assert end_of(batch, job).state is JobState.FINISHED
    (log,) = tmp_path.glob("*.log")
    assert set(log.read_text().split()) == {"to-stdout", "to-stderr"}
    assert read_end(tmp_path / "jobs", job) == End(0)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "jobs").iterdir()} == {0o600}


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
    assert end_of(batch, job).state is JobState.CANCELLED
    assert (tmp_path / "step-done").exists()
    assert not (tmp_path / "told").exists()


def test_the_wall_clock_limit_ends_a_job_and_all_its_processes(batch, submit, tmp_path):
    job = submit(f"sleep 60 & echo $! >{tmp_path}/pid; wait", wall_s=3)
    sleeper = process_in(tmp_path / "pid")
    end = end_of(batch, job)
    assert (end.state, end.exit_code, end.reason) == (JobState.TIMEOUT, 143, "reached its limit of 3 s")
    wait_for(lambda: not sleeper.alive)


def test_the_time_that_a_job_waits_for_another_does_not_count(batch, submit):
    first = submit("sleep 4")
    second = submit("exit 0", wall_s=3, after=first)
    assert end_of(batch, second).state is JobState.FINISHED


def test_a_script_that_ignores_its_limit_is_killed_after_grace(tmp_path):
    script = script_of(tmp_path, f"trap '' TERM; echo $$ >{tmp_path}/pid; while true; do sleep 0.1; done")
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    arguments = [str(jobs), "job", str(script), "--wall=3", *SLOTS]
    subprocess.run([sys.executable, "-c", IMPATIENT, *arguments], timeout=60, check=True)
    assert read_end(jobs, "job") == End(137, "timeout", "reached its limit of 3 s")


def test_what_a_finished_script_left_running_is_killed(batch, submit, tmp_path):
    job = submit(f"sleep 60 & echo $! >{tmp_path}/pid; exit 0")
    assert end_of(batch, job).state is JobState.FINISHED
    wait_for(lambda: not process_in_or_gone(tmp_path / "pid"))


def process_in_or_gone(path):
    try:
        return process_in(path).alive
    except OSError:
        return False


def test_two_supervisors_of_one_job_run_its_script_once(tmp_path):
    script = script_of(tmp_path, f"echo ran >>{tmp_path}/runs; sleep 0.3")
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    command = [sys.executable, "-m", "hetctl.cluster.batch.supervisor", str(jobs), "job", str(script)]
    supervisors = [subprocess.Popen([*command, "--wall=60", *SLOTS]) for _ in range(4)]
    assert [supervisor.wait(timeout=60) for supervisor in supervisors] == [0] * 4
    assert (tmp_path / "runs").read_text() == "ran\n"
    assert sorted(path.name for path in jobs.iterdir()) == ["job.claim", "job.end"]


def test_a_job_that_is_submitted_again_is_the_same_job(batch, submit, tmp_path):
    job = submit(f"echo ran >>{tmp_path}/runs; sleep 0.5")
    again = JobRequest(job, script_of(tmp_path, f"echo again >>{tmp_path}/runs"), (), 60, SITE, 1)
    assert batch.submit(again) == job
    assert end_of(batch, job).state is JobState.FINISHED
    assert batch.submit(again) == job
    assert (tmp_path / "runs").read_text() == "ran\n"


def test_a_job_runs_once_when_its_submitter_is_killed(batch, tmp_path):
    script = script_of(tmp_path, f"echo ran >>{tmp_path}/runs")
    command = [sys.executable, "-c", SUBMITTER, str(tmp_path / "jobs"), "token", str(script)]
    killed = subprocess.run([*command, "kill"], check=False)
    assert killed.returncode == -signal.SIGKILL
    subprocess.run([*command, "again"], check=True)
    assert batch.find(["token", "other"]) == {"token": "token"}
    assert end_of(batch, "token").state is JobState.FINISHED
    assert (tmp_path / "runs").read_text() == "ran\n"


def test_an_error_names_the_log_when_a_supervisor_cannot_start(batch, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    request = JobRequest("job", script_of(tmp_path, "exit 0"), (), 60, SITE, 1)
    with pytest.raises(BatchSystemError, match="supervisor of job did not start") as caught:
        batch.submit(request)
    assert str(request.script.with_suffix(".log")) in caught.value.hint
    assert batch.find(["job"]) == {}


def test_a_script_whose_supervisor_is_killed_is_told_to_leave(batch, submit, tmp_path):
    job = submit(
        f"trap 'touch {tmp_path}/told; sleep 60; exit 0' TERM; touch {tmp_path}/ready; sleep 60 & wait"
    )
    wait_for((tmp_path / "ready").exists)
    os.kill(read_claim(tmp_path / "jobs", job).supervisor.pid, signal.SIGKILL)
    wait_for((tmp_path / "told").exists)
    assert state_of(batch, job) is JobState.RUNNING  # as long as anything of it runs
    batch.cancel([job])  # at once: nobody is left who could wait
    end = end_of(batch, job)
    assert (end.state, end.exit_code, end.reason) == (JobState.FAILED, None, "its supervisor was killed")


def test_a_script_is_in_the_claim_before_it_runs(batch, submit, tmp_path):
    """Or it would be taken for ended, as it runs on, if its supervisor were killed at its start."""
    job = submit(f"cp {tmp_path}/jobs/*.claim {tmp_path}/seen; sleep 60")
    wait_for(lambda: (tmp_path / "seen").exists() and (tmp_path / "seen").read_text())
    assert json.loads((tmp_path / "seen").read_text())["script"] is not None
    batch.cancel([job])


def test_a_process_with_a_supervisors_pid_is_not_taken_for_it(batch, submit, tmp_path):
    job = submit("sleep 60")
    wait_for(lambda: state_of(batch, job) is JobState.RUNNING)
    folder, claimed = tmp_path / "jobs", read_claim(tmp_path / "jobs", job)
    older = Process(os.getpid(), Process.of(os.getpid()).started - 1)
    write_json(claim_file(folder, "old"), encode(replace(claimed, supervisor=older, script=older)))
    assert state_of(batch, "old") is JobState.FAILED
    batch.cancel(["old"])  # does not signal this process


def test_a_job_is_unknown_elsewhere_and_over_after_a_restart(batch, tmp_path):
    folder, me = tmp_path / "jobs", Process.of(os.getpid())
    folder.mkdir()
    here = HostBoot.this()
    assert claim(folder, "elsewhere", Claim(replace(here, host="elsewhere"), me))
    assert claim(folder, "before", Claim(replace(here, boot="another"), me))
    statuses = batch.statuses(["elsewhere", "before"])
    assert statuses["elsewhere"].state is JobState.UNKNOWN
    assert statuses["elsewhere"].reason == "runs on elsewhere"
    assert statuses["before"].state is JobState.NODE_FAILED
    batch.cancel(["elsewhere", "before"])  # does not signal this process


def test_a_claim_whose_answer_was_lost_is_repeated(tmp_path):
    """The link was made, and its answer was an error of the disk: the repeated call finds a claim there."""
    mine = Claim(HostBoot.this(), Process.of(os.getpid()))
    assert claim(tmp_path, "job", mine)
    assert claim(tmp_path, "job", mine)
    assert not claim(tmp_path, "job", replace(mine, machine=replace(mine.machine, host="elsewhere")))


def test_a_job_that_ends_between_two_looks_is_not_taken_for_dead(batch, tmp_path, monkeypatch):
    """Its end is written just after it was looked for, and then its supervisor is gone."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    claim(folder, "job", Claim(HostBoot.this(), Process.of(os.getpid())))

    def ends_now(_process):
        end_file(folder, "job").write_text(json.dumps(encode(End(0))))
        return False

    monkeypatch.setattr(Process, "alive", property(ends_now))
    assert state_of(batch, "job") is JobState.FINISHED


def test_ctrl_c_in_the_terminal_does_not_reach_a_job(batch, submit, tmp_path):
    job = submit("sleep 60")
    wait_for(lambda: state_of(batch, job) is JobState.RUNNING)
    claimed = read_claim(tmp_path / "jobs", job)
    groups = {os.getpgid(process.pid) for process in (claimed.supervisor, claimed.script)}
    assert os.getpgid(0) not in groups
    assert len(groups) == 2
    assert {os.getsid(process.pid) for process in (claimed.supervisor, claimed.script)} == groups
    assert Path("/proc", str(claimed.script.pid)).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_its_supervisor_cancels_a_job(batch, submit, tmp_path, number):
    running = submit("sleep 60", gpus=3)
    wait_for(lambda: state_of(batch, running) is JobState.RUNNING)
    waiting = submit("sleep 60", gpus=3)
    wait_for(lambda: is_locked(tmp_path / "locks" / "slot-turn"))
    for job in (waiting, running):
        os.kill(read_claim(tmp_path / "jobs", job).supervisor.pid, number)
    assert [end_of(batch, job).state for job in (waiting, running)] == [JobState.CANCELLED] * 2
    assert not any("Traceback" in log.read_text() for log in tmp_path.rglob("*.log"))


def test_jobs_that_run_at_the_same_time_have_slots_of_their_own(batch, submit, tmp_path):
    scripts = [f"echo $HETCTL_GIVEN_GPUS >{tmp_path}/given-{n}; sleep 60" for n in range(2)]
    jobs = [submit(scripts[0], gpus=2), submit(scripts[1], gpus=1)]
    wait_for(lambda: all(state_of(batch, job) is JobState.RUNNING for job in jobs))
    given = [tmp_path / "given-0", tmp_path / "given-1"]
    wait_for(lambda: all(path.exists() and path.read_text() for path in given))
    numbers = [number for path in given for number in path.read_text().strip().split(",")]
    assert sorted(numbers) == ["0", "1", "2"]


def test_a_job_that_waits_for_slots_can_be_cancelled(batch, submit, tmp_path):
    running = submit("sleep 60", gpus=2)
    wait_for(lambda: state_of(batch, running) is JobState.RUNNING)
    waiting = submit(f"touch {tmp_path}/ran", gpus=2)
    patient = submit("exit 0", gpus=3)
    wait_for(lambda: is_locked(tmp_path / "locks" / "slot-turn"))
    assert [state_of(batch, job) for job in (waiting, patient)] == [JobState.PENDING] * 2
    batch.cancel([waiting, running])
    end = end_of(batch, waiting)
    assert (end.state, end.exit_code) == (JobState.CANCELLED, None)
    assert end_of(batch, patient).state is JobState.FINISHED
    assert not (tmp_path / "ran").exists()


def test_a_large_job_gets_slots_though_small_ones_keep_coming(batch, submit, tmp_path):
    leave = tmp_path / "leave"
    first = submit(f"while [ ! -e {leave} ]; do sleep 0.05; done")
    wait_for(lambda: state_of(batch, first) is JobState.RUNNING)
    large = submit(f"echo large >>{tmp_path}/order", gpus=3)
    wait_for(lambda: is_locked(tmp_path / "locks" / "slot-turn"))
    small = [submit(f"echo small >>{tmp_path}/order") for _ in range(3)]
    leave.touch()
    assert [end_of(batch, job).state for job in (large, *small)] == [JobState.FINISHED] * 4
    assert (tmp_path / "order").read_text().split() == ["large", *["small"] * 3]


def test_jobs_of_two_projects_share_the_machine(batch, submit, tmp_path):
    first = submit("sleep 60", gpus=3)
    wait_for(lambda: state_of(batch, first) is JobState.RUNNING)
    other = LocalBatch(tmp_path / "other-project")
    second = other.submit(JobRequest("other", script_of(tmp_path, "exit 0"), (), 60, SITE, 1))
    wait_for(lambda: is_locked(tmp_path / "locks" / "slot-turn"))
    assert state_of(other, second) is JobState.PENDING
    batch.cancel([first])
    assert end_of(other, second).state is JobState.FINISHED


def test_slots_are_held_until_a_killed_supervisors_job_ends(batch, submit, tmp_path):
    leave = tmp_path / "leave"
    ignoring = f"trap '' TERM; touch {tmp_path}/ready; while [ ! -e {leave} ]; do sleep 0.05; done"
    job = submit(ignoring, gpus=3)
    wait_for((tmp_path / "ready").exists)
    os.kill(read_claim(tmp_path / "jobs", job).supervisor.pid, signal.SIGKILL)
    after = submit("exit 0")
    wait_for(lambda: is_locked(tmp_path / "locks" / "slot-turn"))
    assert state_of(batch, after) is JobState.PENDING
    leave.touch()
    assert end_of(batch, after).state is JobState.FINISHED


def test_locks_in_a_folder_of_another_user_are_refused(submit, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(BatchSystemError, match="belongs to another user") as caught:
        submit("exit 0")
    assert "HETCTL_SLOT_LOCKS" in caught.value.hint


@pytest.mark.parametrize("file_of", [claim_file, end_file])
def test_a_damaged_file_of_a_job_is_named(tmp_path, file_of):
    boot = HostBoot.this()
    assert claim(tmp_path, "j", Claim(boot, Process.of(os.getpid())))
    file_of(tmp_path, "j").write_bytes(b"")
    with pytest.raises(DamagedFileError, match=f"{file_of(tmp_path, 'j').name} is damaged") as caught:
        LocalBatch(tmp_path).statuses(["j"])
    assert "delete it once no process of the job is left" in caught.value.hint
