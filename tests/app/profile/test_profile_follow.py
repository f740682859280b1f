"""A profile that is told to end: its job goes on, and the next one follows it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
from profiles import events_below, local_jobs, measured, measurings, members, profiling_project
from workbench import TIMEOUT_S, Result, alive, wait_for

from hetctl.catalog.lock import ProjectLock
from hetctl.cli.profile_display import ProfileDisplay
from hetctl.storage.profile_request import read_jobs

QUESTION = "cancel the job, or leave it measuring? [c/d]"


@pytest.fixture
def project(tmp_path):
    project = profiling_project(tmp_path)
    members(project, quick=(1, "{}"), slow=(1, gated(project)))
    yield project
    open_gate(project)
    wait_for(lambda: not alive(str(project.path)))


def gated(project):
    """The configuration of a member that is not measured before its gate is open."""
    return f"{{gate: {project.path}/gate}}"


def open_gate(project):
    (project.path / "gate").touch()


def wait_for_a_point(project):
    wait_for(lambda: measurings(project))


def leave_measuring(project):
    """Leave a job behind that has measured its first point."""
    assert project.here("profile", "--detach").code == 0
    wait_for_a_point(project)


def profile_again(project, *arguments):
    """Profile, and open the gate when there is a job to be followed."""
    process = project.start("profile", "--json", *arguments)
    said = process.stderr.readline()
    open_gate(project)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    return Result(process.returncode, stdout, said + stderr)


class Terminal:
    """A command on a terminal of its own, which is its session's."""

    def __init__(self, project, *arguments):
        self._master, slave = pty.openpty()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HETCTL_SITE")}
        self.process = subprocess.Popen(
            [str(project.python), "-m", "hetctl", *arguments],
            cwd=project.path,
            env={**environment, **project.environment, "TERM": "xterm"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.shown = ""

    def type(self, text):
        os.write(self._master, text.encode())

    def read(self, seconds=0.1):
        if select.select([self._master], [], [], seconds)[0]:
            with contextlib.suppress(OSError):
                self.shown += os.read(self._master, 65536).decode(errors="replace")
        return self.shown

    def wait_for(self, text):
        wait_for(lambda: text in self.read(), seconds=TIMEOUT_S)

    def hang_up(self):
        os.close(self._master)

    def end(self):
        limit = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None:
            assert time.monotonic() < limit, self.shown
            self.read()
        self.read(0)
        return self.process.returncode


@pytest.fixture
def on_terminal(project):
    terminals = []

    def start(*arguments):
        terminals.append(Terminal(project, *arguments))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.process.kill()
        terminal.process.wait()
        with contextlib.suppress(OSError):
            terminal.hang_up()


def test_the_next_command_follows_the_job_of_a_signalled_one(project):
    process = project.start("profile")
    wait_for_a_point(project)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    (job,) = local_jobs(project)
    assert process.returncode == 128 + signal.SIGTERM
    assert f"hetctl: SIGTERM: job {job} goes on measuring\nhint: `hetctl profile`" in stderr
    assert "Traceback" not in stdout + stderr
    assert not project.home.lock.exists()
    assert measured(project) == [("quick", 1)]

    again = profile_again(project)
    assert (again.code, again.json["measured"], again.json["known"]) == (0, 1, 1)
    assert again.stderr == f"job {job} measures 1 of these points already: following it\n"
    assert local_jobs(project) == [job]
    assert measurings(project) == ["quick-1", "slow-1"]
    assert measured(project) == [("quick", 1), ("slow", 1)]
    (record,) = map(read_jobs, project.home.profiles.iterdir())
    assert record.over


def test_a_forced_point_of_a_detached_job_is_not_doubled_and_counts_as_measured(project):
    detached = project.here("profile", "--detach", "--json")
    (job,) = local_jobs(project)
    assert (detached.code, detached.json["measured"]) == (0, 0)
    assert [each["job"] for each in detached.json["under_way"]] == [job]
    assert "already" in project.here("profile", "--detach").stderr
    wait_for_a_point(project)
    again = profile_again(project, "--force")
    assert (again.code, again.json["measured"], again.json["known"]) == (0, 2, 0)
    assert measurings(project) == ["quick-1", "slow-1"]
    assert local_jobs(project) == [job]


def test_a_second_command_waits_for_the_job_of_the_first_whose_progress_is_shown(project):
    first = project.start("profile")
    wait_for_a_point(project)
    before = {path: path.stat().st_mtime_ns for path in project.home.path.glob("*.db")}
    shown = project.here("profile", "show", "--json").json
    (job,) = local_jobs(project)
    assert shown["under_way"] == [{"job": job, "state": "running", "reason": "", "points": 2, "measured": 1}]
    assert [point["member"] for point in shown["points"]] == ["quick"]
    for_people = project.here("profile", "show").stdout
    assert f"job {job} (running) has measured 1 of 2 points" in for_people
    assert {path: path.stat().st_mtime_ns for path in project.home.path.glob("*.db")} == before
    second = project.start("profile", "--json")
    assert "of these points already" in second.stderr.readline()
    # Nor do they keep the lock while they wait.
    with ProjectLock(project.home.lock, "another command", patience_s=10.0):
        pass
    open_gate(project)
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], outputs
    assert measurings(project) == ["quick-1", "slow-1"]
    assert local_jobs(project) == [job]
    assert project.here("profile", "show", "--json").json["under_way"] == []


def test_only_missing_points_are_submitted_failed_ones_not_again(project):
    members(project, bad=(1, "{fail: true}"), quick=(1, "{}"), slow=(1, gated(project)))
    process = project.start("profile", "--json")
    wait_for_a_point(project)
    wait_for(lambda: any(event.kind == "failed" for event in events_below(project)))
    process.send_signal(signal.SIGTERM)
    told = Result(0, *process.communicate(timeout=TIMEOUT_S))
    assert (process.returncode, told.error["kind"], told.stderr) == (143, "interrupted", "")
    members(project, bad=(1, "{fail: true}"), quick=(1, "{units: 3}"), slow=(2, gated(project)))
    again = profile_again(project)
    assert again.code == 5
    assert [failure["point"]["member"] for failure in again.json["failures"]] == ["bad"]
    assert "measures 2 of these points already" in again.stderr
    assert measurings(project) == ["quick-1", "quick-1", "slow-1", "slow-2"]
    assert sum(event.kind == "failed" for event in events_below(project)) == 1
    assert len(local_jobs(project)) == 2


def test_points_that_a_job_lost_are_measured_by_a_new_one(project):
    leave_measuring(project)
    members(project, quick=(1, "{}"), slow=(1, gated(project)), new=(1, "{units: 3}"))
    process = project.start("profile", "--json")
    assert "following it" in process.stderr.readline()
    for supervisor in set(alive("hetctl.cluster.batch.supervisor")) & set(alive(str(project.path))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGTERM)
    wait_for(lambda: len(local_jobs(project)) == 2)
    open_gate(project)
    stdout, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, stdout
    assert measurings(project) == ["new-1", "quick-1", "slow-1"]
    assert len(local_jobs(project)) == 2


def test_a_job_of_another_ensemble_is_left_alone(project):
    leave_measuring(project)
    text = (project.path / "ensemble.yaml").read_text()
    text = text.replace("name: many", "name: other").replace(gated(project), "{units: 3}")
    (project.path / "other.yaml").write_text(text)
    process = project.start("profile", "--ensemble", "other.yaml", "--json")
    wait_for(lambda: len(local_jobs(project)) == 2)
    open_gate(project)  # the other job waits for free slots
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    other = Result(process.returncode, stdout, stderr)
    assert (other.code, other.json["measured"], other.stderr) == (0, 2, "")
    assert len(local_jobs(project)) == 2


@pytest.mark.parametrize(
    ("typed", "cancels"), [("C\n", True), ("what?\n c\n", True), ("d\n", False), ("no\n", False), ("", False)]
)
def test_a_job_is_cancelled_by_this_answer_alone(monkeypatch, capsys, typed, cancels):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert ProfileDisplay(quiet=True).cancels(["17"]) is cancels
    assert capsys.readouterr().err == f"{QUESTION} " * (typed.count("\n") + (typed in ("", "no\n")))


@pytest.mark.parametrize(
    ("typed", "cancelled"), [("what?\nc\n", True), ("\x03", False)], ids=["nonsense, then c", "Ctrl-C"]
)
def test_ctrl_c_on_a_terminal_asks(project, on_terminal, typed, cancelled):
    terminal = on_terminal("profile")
    terminal.wait_for("1/2")
    terminal.type("\x03")
    terminal.wait_for(QUESTION)
    terminal.type(typed)
    assert terminal.end() == 130
    assert ("is cancelled" in terminal.shown, "goes on measuring" in terminal.shown) == (
        cancelled,
        not cancelled,
    )
    assert "Traceback" not in terminal.shown
    # A cancelled job ends without its gate, but not before the command does.
    if not cancelled:
        open_gate(project)
    wait_for(lambda: not alive(str(project.path)))
    assert measurings(project) == (["quick-1"] if cancelled else ["quick-1", "slow-1"])
    assert measured(project) == ([("quick", 1)] if cancelled else [("quick", 1), ("slow", 1)])


def test_a_terminal_that_is_lost_leaves_the_job_and_the_lock(project, on_terminal):
    terminal = on_terminal("profile")
    terminal.wait_for("1/2")
    terminal.hang_up()
    assert terminal.process.wait(timeout=TIMEOUT_S) == 128 + signal.SIGHUP
    assert not project.home.lock.exists()
    again = profile_again(project)
    assert (again.code, len(local_jobs(project))) == (0, 1)
    assert measurings(project) == ["quick-1", "slow-1"]


def test_under_nohup_a_lost_terminal_ends_nothing(project):
    process = project.start("profile", prefix=("nohup",))
    wait_for_a_point(project)
    process.send_signal(signal.SIGHUP)
    open_gate(project)
    assert process.wait(timeout=TIMEOUT_S) == 0
    process.communicate()
    assert measurings(project) == ["quick-1", "slow-1"]
