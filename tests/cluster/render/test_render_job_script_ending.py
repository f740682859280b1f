"""How scripts measure their time, tell of the end of the job, and claim their number."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_render_job_script import SITES, job, prepare, run_script, wait_for

from hetctl.cluster.render import JobScript
from hetctl.model.job import SUPERSEDED_EXIT
from hetctl.model.site import Site

# Plays a driver that leaves when the job's stop file is there.
STOP = "../runs/digits-1/job-0002.stop"
HEEDS = f"touch up; while [ ! -e {STOP} ]; do sleep 0.02; done; cp {STOP} told"


@pytest.fixture
def local_job() -> JobScript:
    return job(SITES["local"])


def deadline_of(records: Path) -> int:
    words = (records / "driver").read_text().splitlines()
    return int(words[words.index("--deadline") + 1])


def with_time_left(folder: Path, script: JobScript, measured: str) -> JobScript:
    """Let the site measure its time by a template of its own."""
    block = "{% block time_left %}\nmeasured=" + repr(measured) + "\n{% endblock %}"
    folder.mkdir(exist_ok=True)
    (folder / "measured.sh.j2").write_text('{% extends "local.sh.j2" %}' + block)
    return dataclasses.replace(script, site=dataclasses.replace(script.site, template="measured.sh.j2"))


@pytest.mark.parametrize(
    ("measured", "left"),
    [
        ("9:59", 599),
        ("1:08:09", 4089),
        ("0-00:10:00", 600),
        ("1-00:00:00", 5430),
        ("2:30:00", 5430),
        ("UNLIMITED", 5430),
        ("INVALID", 5430),
        ("", 5430),
    ],
)
def test_the_deadline_is_measured_and_never_later_than_the_limit(
    tmp_path: Path, local_job: JobScript, monkeypatch: pytest.MonkeyPatch, measured: str, left: int
) -> None:
    script = with_time_left(tmp_path / "templates", local_job, measured)
    monkeypatch.setattr(
        "test_render_job_script.render_job", lambda job: _render(job, [tmp_path / "templates"])
    )
    before = int(time.time())
    records = run_script(tmp_path / "job", script, "true")
    assert before <= deadline_of(records) - left + local_job.grace_s <= time.time()


def _render(script: JobScript, folders: list[Path]) -> str:
    from hetctl.cluster.render import render_job

    return render_job(script, folders)


@pytest.mark.parametrize("sent", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_becomes_the_stop_file_and_the_script_survives(
    tmp_path: Path, local_job: JobScript, sent: signal.Signals
) -> None:
    records, command, environment = prepare(tmp_path, local_job, f"{HEEDS}; sleep 0.3; code=7")
    process = subprocess.Popen(command, env=environment)
    wait_for(records / "up")
    wait_for_trap(process.pid, sent)
    process.send_signal(sent)
    wait_for(records / "told")
    process.send_signal(signal.SIGUSR2)
    assert process.wait(timeout=60) == 7
    assert (records / "told").read_text() == "signal\n"
    assert (records / "advance").exists()


def test_the_script_stops_training_in_time_without_a_signal(tmp_path: Path, local_job: JobScript) -> None:
    # A long grace: after nine tenths of it the driver is killed, and on a busy machine it is late to heed.
    short = dataclasses.replace(local_job, wall_s=42, grace_s=40)
    records, command, environment = prepare(tmp_path, short, HEEDS)
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    assert process.wait(timeout=60) == 0
    assert (records / "told").read_text() == "deadline\n"
    assert_gone(process.pid)


def test_a_job_that_is_done_early_leaves_no_watch(tmp_path: Path, local_job: JobScript) -> None:
    _, command, environment = prepare(tmp_path, local_job, "sleep 0.2")
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    assert process.wait(timeout=60) == 0
    assert_gone(process.pid)
    assert not (tmp_path / "runs" / "digits-1" / "job-0002.stop").exists()


def wait_for_trap(pid: int, caught: signal.Signals) -> None:
    """Wait until a process catches a signal; the script sets its traps after it has started the driver."""
    limit = time.monotonic() + 60
    while True:
        status = Path(f"/proc/{pid}/status").read_text().split()
        if int(status[status.index("SigCgt:") + 1], 16) >> (caught - 1) & 1:
            return
        assert time.monotonic() < limit, caught
        time.sleep(0.01)


def assert_gone(group: int) -> None:
    """Wait until no process of a group is left."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise AssertionError("a process is left")


def test_a_warning_of_the_limit_that_is_too_early_is_ignored(tmp_path: Path, local_job: JobScript) -> None:
    short = dataclasses.replace(local_job, wall_s=43, grace_s=40)
    records, command, environment = prepare(tmp_path, short, HEEDS)
    process = subprocess.Popen(command, env=environment)
    wait_for(records / "up")
    wait_for_trap(process.pid, signal.SIGUSR2)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(timeout=60) == 0
    assert (records / "told").read_text() == "deadline\n"


def test_a_driver_that_hangs_is_ended_and_the_run_goes_on(tmp_path: Path, local_job: JobScript) -> None:
    short = dataclasses.replace(local_job, wall_s=3, grace_s=2)
    records, command, environment = prepare(tmp_path, short, "exec sleep 30")
    assert subprocess.run(command, env=environment, timeout=60).returncode == 137
    assert (records / "advance").exists()


def test_a_second_job_with_the_same_number_leaves_at_once(tmp_path: Path, local_job: JobScript) -> None:
    job = dataclasses.replace(local_job, site=on_slurm())
    records, _, environment = prepare(tmp_path, job, HEEDS)
    command = ["bash", str(tmp_path / "runs" / "digits-1" / "job-0002.sh")]
    first = subprocess.Popen(command, env={**environment, "SLURM_JOB_ID": "101"})
    wait_for(records / "up")
    second = {**environment, "SLURM_JOB_ID": "102"}
    left = subprocess.run(command, env=second, timeout=60, capture_output=True, text=True)
    assert (left.returncode, left.stderr) == (
        SUPERSEDED_EXIT,
        "job 102 leaves: job 101 is job 2 of run digits-1 already\n",
    )
    assert not (records / "advance").exists()
    assert first.poll() is None
    wait_for_trap(first.pid, signal.SIGTERM)
    first.terminate()
    assert first.wait(timeout=60) == 0
    (claim,) = (tmp_path / "runs" / "digits-1").glob("*.claim*")
    assert (claim.name, claim.read_text()) == ("job-0002.claim", "101\n")


ONCE = """\
#!/bin/bash
# Stands for {command}, and fails the first time.
mkdir "$RECORDS/{command} failed" 2>/dev/null && exit 1
exec {path} "$@"
"""
SHORT_PAUSES = """\
#!/bin/bash
echo "$1" >>"$RECORDS/pauses"
"""


def test_a_disk_that_fails_for_a_moment_costs_no_job(tmp_path: Path, local_job: JobScript) -> None:
    """The script can neither make the link nor read it at first."""
    records, command, environment = prepare(tmp_path, local_job, "true")
    stands_for = {name: ONCE.format(command=name, path=shutil.which(name)) for name in ("ln", "cat")}
    for name, text in {**stands_for, "sleep": SHORT_PAUSES}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    assert subprocess.run(command, env=environment, timeout=60).returncode == 0
    assert (records / "driver").exists()
    assert (records / "pauses").read_text().split()[:2] == ["5", "10"]
    (claim,) = (tmp_path / "runs" / "digits-1").glob("*.claim*")
    assert claim.read_text() == f"{local_job.name}\n"


def on_slurm(name: str = "slurm") -> Site:
    return dataclasses.replace(SITES[name], setup=(), directives=(), environment={})


def test_a_requeued_job_continues_and_removes_its_stop_file(tmp_path: Path, local_job: JobScript) -> None:
    records, command, environment = prepare(tmp_path, local_job, "ls ../runs/digits-1 >seen")
    for _ in range(2):
        (tmp_path / "runs" / "digits-1" / "job-0002.stop").write_text("signal\n")
        assert subprocess.run(command, env=environment, timeout=60).returncode == 0
        assert "job-0002.stop" not in (records / "seen").read_text()
        (records / "seen").unlink()


def test_a_requeued_job_that_has_handed_the_run_on_leaves(tmp_path: Path, local_job: JobScript) -> None:
    records, command, environment = prepare(tmp_path, local_job, "touch driven")
    (tmp_path / "runs" / "digits-1" / "job-0003.sh").touch()
    assert subprocess.run(command, env=environment, timeout=60).returncode == 0
    assert not (records / "driven").exists()
    assert (records / "advance").read_text().split() == ["--after-job", "2", "--", "digits-1"]
    log = (tmp_path / "runs" / "digits-1" / "job-0002.log").read_text()
    assert "leaves: job 3 of run digits-1 takes its place" in log


@pytest.mark.parametrize(("name", "variable"), [("slurm", "SLURM_JOB_ID"), ("summit", "LSB_JOBID")])
def test_batch_systems_number_their_jobs(
    tmp_path: Path, local_job: JobScript, name: str, variable: str
) -> None:
    job = dataclasses.replace(local_job, site=on_slurm(name))
    records, _, environment = prepare(tmp_path, job, "true")
    script = str(tmp_path / "runs" / "digits-1" / "job-0002.sh")
    subprocess.run(["bash", script], env={**environment, variable: "4711"}, check=True, timeout=60)
    assert (records / "driver").read_text().splitlines()[-1] == "4711"
    assert (tmp_path / "runs" / "digits-1" / "job-0002.claim").read_text() == "4711\n"
