"""The live table of a run on a pseudo-terminal: its keys choose members and act on them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time

import pytest
from workbench import alive, pretending, pretending_project, wait_for

LAB = {"HETCTL_SITE": "lab"}
SITE = "extends: local\ngpus_per_node: 3\ncores_per_node: 3\n"
ROWS, COLUMNS = 30, 100
CODE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")
HOME = "\x1b[H"


class Terminal:
    """A command on a pseudo-terminal of 30 lines."""

    def __init__(self, project, *arguments: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(project.path)
            environment = {**os.environ, **project.environment, "TERM": "xterm-256color"}
            os.execve(project.python, [str(project.python), "-m", "hetctl", *arguments], environment)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.text = ""

    def read(self, seconds: float = 0.2) -> str:
        """Return all that was shown so far, until nothing comes for some time."""
        while select.select([self.fd], [], [], seconds)[0]:
            try:
                self.text += os.read(self.fd, 65536).decode(errors="replace")
            except OSError:
                break
        return self.text

    @property
    def screen(self) -> str:
        """Last drawn screen, without colours."""
        return CODE.sub("", self.read().rpartition(HOME)[2])

    @property
    def chosen(self) -> str:
        """The member whose row is shown in reverse."""
        rows = [line for line in self.read().rpartition(HOME)[2].split("\n") if "\x1b[7" in line]
        return CODE.sub("", rows[0]).split()[0] if rows else ""

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def ended(self) -> int:
        """Wait for the end of the command; return its exit code."""
        limit = time.monotonic() + 60
        while (done := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            self.read(0.05)
            assert time.monotonic() < limit
        self.read(0.05)
        return os.waitstatus_to_exitcode(done[1])


@pytest.fixture
def project(tmp_path):
    members = dict.fromkeys("abc", "{epochs: 4000}")
    made = pretending_project(tmp_path, pretending(most_epochs=5000, **members), environment=LAB)
    (made.path / "site-configs").mkdir()
    (made.path / "site-configs" / "lab.yaml").write_text(SITE)
    assert made.here("submit", "--gpus", "3").code == 0
    yield made
    made.here("cancel")
    wait_for(lambda: not alive(str(made.path)))
    made.check_runs()


def states(project) -> dict[str, str]:
    return {m["member"]: m["state"] for m in project.here("status", "--json").json["members"]}


def test_keys_choose_a_member_show_its_log_and_act_on_it(project):
    wait_for(lambda: len(project.epochs()) == 3)
    shown = Terminal(project, "status", "--watch")
    before = termios.tcgetattr(shown.fd)
    wait_for(lambda: shown.chosen == "a")
    assert "q quit" in shown.screen
    shown.press("\x1b[B")
    wait_for(lambda: shown.chosen == "b")
    shown.press("p")
    wait_for(lambda: states(project)["b"] == "paused")
    # Those in training come before it now, and it is still the chosen one.
    wait_for(lambda: "paused" in shown.screen and shown.chosen == "b")
    shown.press("s")
    wait_for(lambda: "sort (by name)" in shown.screen and shown.chosen == "a")
    shown.press("\x1b[B\x1b[B\x1b[A")
    wait_for(lambda: shown.chosen == "b")
    shown.press("p")
    wait_for(lambda: states(project)["b"] == "training")
    shown.press("l")
    wait_for(lambda: "log of b" in shown.screen)
    project.home.run("trio-001").log_of("b").write_text("first\nthe last line\n")
    wait_for(lambda: "the last line" in shown.screen and "log of b" in shown.screen)
    shown.press("l")
    wait_for(lambda: shown.chosen == "b")
    shown.press("cn")
    wait_for(lambda: "cancel b for good" not in shown.screen)
    assert states(project)["b"] == "training"
    shown.press("c")
    wait_for(lambda: "cancel b for good? y: yes" in shown.screen)
    shown.press("y")
    wait_for(lambda: states(project)["b"] == "cancelled")
    shown.press("q")
    assert shown.ended() == 0
    assert "run trio-001 goes on" in shown.text
    assert before[3] & termios.ECHO


@pytest.mark.parametrize("end", [signal.SIGINT, "run"])
def test_the_terminal_is_as_before_after_ctrl_c_and_at_the_end_of_the_run(project, end):
    wait_for(lambda: len(project.epochs()) == 3)
    shown = Terminal(project, "status", "--watch")
    wait_for(lambda: shown.chosen == "a")
    if end == "run":
        project.here("cancel")
        assert shown.ended() == 0
        assert "cancelled" in shown.text.rpartition("\x1b[?1049l")[2]
    else:
        shown.press("\x03")
        assert shown.ended() == 130
        assert "run trio-001 goes on" in shown.text.rpartition("\x1b[?1049l")[2]
    assert shown.text.count("\x1b[?1049h") == shown.text.count("\x1b[?1049l") == 1
