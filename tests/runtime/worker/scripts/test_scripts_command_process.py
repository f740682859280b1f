"""Reports of a command: lines of JSON, and what is none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from hetctl import script
from hetctl.model.training_settings import ANSWER_VARIABLE, PROGRESS_VARIABLE, STOP_VARIABLE
from hetctl.runtime.worker.scripts.command_process import (
    MAX_LINE_BYTES,
    ScriptReport,
    WrongReportError,
    parse_report,
    printable,
    whole_lines,
)

ALONE = """
import hetctl, sys
hetctl.report(epoch=1, val_loss=0.5)
assert not hetctl.should_stop()
assert hetctl.last_checkpoint() is None
print(*({"numpy", "yaml", "pydantic", "torch", "tensorflow", "click"} & set(sys.modules)))
"""


def test_what_a_script_reports_is_read_back(monkeypatch):
    source, target = os.pipe()
    monkeypatch.setenv(PROGRESS_VARIABLE, str(target))
    monkeypatch.chdir("/tmp")
    script.report(epoch=3, samples=100, val_loss=0.5)
    script.report(epoch=4, samples=50, finished=False, loss=0.25)
    script.report(checkpoint="epoch-3")
    os.close(target)
    with os.fdopen(source, "rb") as file:
        reports = [parse_report(line) for line in file]
    assert reports == [
        ScriptReport(3, {"val_loss": 0.5}, 100.0),
        ScriptReport(4, {"loss": 0.25}, 50.0, finished=False),
        ScriptReport(None, {}, checkpoint="/tmp/epoch-3"),
    ]
    # Nobody reads any more.
    script.report(epoch=4)
    with pytest.raises(TypeError, match="an epoch or a checkpoint"):
        script.report(val_loss=1)


class Unread:
    """A loss on a GPU: to read its value would wait."""

    def __float__(self):
        raise AssertionError


def test_reports_of_each_step_are_dropped_unread(monkeypatch):
    source, target = os.pipe()
    monkeypatch.setenv(PROGRESS_VARIABLE, str(target))
    monkeypatch.setattr(script, "_SENT", script._Sent())
    script.report(epoch=1, samples=1, finished=False, loss=0.5)
    for step in range(2, 100):
        script.report(epoch=1, samples=step, finished=False, loss=Unread())
    script.report(epoch=1, samples=100, val_loss=0.5)
    os.close(target)
    with os.fdopen(source, "rb") as file:
        assert [parse_report(line).samples for line in file] == [1, 100]


def test_a_script_waits_for_the_judgement_of_its_epoch(monkeypatch):
    pipes = {name: os.pipe() for name in (PROGRESS_VARIABLE, ANSWER_VARIABLE, STOP_VARIABLE)}
    for name, (source, target) in pipes.items():
        monkeypatch.setenv(name, str(target if name == PROGRESS_VARIABLE else source))
    monkeypatch.setattr(script, "_SENT", script._Sent())

    def judge():
        with os.fdopen(pipes[PROGRESS_VARIABLE][0], "rb") as lines:
            lines.readline()
            lines.readline()
        time.sleep(0.1)
        os.close(pipes[STOP_VARIABLE][1])
        os.write(pipes[ANSWER_VARIABLE][1], b"..")

    script.report(epoch=1, samples=1, finished=False)
    assert not script.should_stop()  # progress is not waited for
    thread = threading.Thread(target=judge)
    thread.start()
    script.report(epoch=1, val_loss=0.5)
    assert script.should_stop()
    thread.join()


def test_a_loss_that_has_its_gradient_is_reported(monkeypatch):
    class Tensor:
        def detach(self):
            return 0.5

        def __float__(self):
            raise AssertionError("PyTorch warns here")

    ends, progress = os.pipe()
    monkeypatch.setenv(PROGRESS_VARIABLE, str(progress))
    monkeypatch.setattr(script, "_SENT", script._Sent())
    script.report(epoch=1, loss=Tensor())
    assert parse_report(os.read(ends, 2**12)).metrics == {"loss": 0.5}
    os.close(ends)
    os.close(progress)


def test_a_closed_descriptor_tells_a_script_to_stop(monkeypatch):
    source, target = os.pipe()
    monkeypatch.setenv(STOP_VARIABLE, str(source))
    assert not script.should_stop()
    os.close(target)
    assert script.should_stop()
    os.close(source)


def test_the_functions_do_nothing_outside_of_a_run():
    free = {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}
    done = subprocess.run([sys.executable, "-c", ALONE], env=free, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], check=True)
"""
REUSED = """
import hetctl, os, sys
numbers = [int(os.environ[name]) for name in sys.argv[2:]]
for number in numbers:
    os.dup2(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), number)
hetctl.report(epoch=1, val_loss=0.5)
assert not hetctl.should_stop()
print(os.path.getsize(sys.argv[1]))
"""


def test_a_file_is_kept_that_has_the_number_of_a_closed_pipe(tmp_path):
    """A launcher such as torchrun closes the pipes of the script that it starts."""
    ends = dict(zip((PROGRESS_VARIABLE, STOP_VARIABLE), os.pipe(), strict=True))
    command = [sys.executable, "-c", LAUNCHER, "-c", REUSED, str(tmp_path / "weights"), *ends]
    environment = os.environ | {name: str(number) for name, number in ends.items()}
    done = subprocess.run(
        command, env=environment, pass_fds=tuple(ends.values()), capture_output=True, text=True, check=True
    )
    for number in ends.values():
        os.close(number)
    assert done.stdout.strip() == "0"
    assert f"{PROGRESS_VARIABLE} is closed in this process" in done.stderr


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (b"\xff\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"7", "not a JSON object"),
        (b'{"val_loss": 1}', "epoch must be"),
        (b'{"epoch": true}', "epoch must be"),
        (b'{"epoch": 0}', "epoch must be"),
        (b'{"epoch": 1, "samples": -1}', "samples must be"),
        (b'{"epoch": 1, "seconds": Infinity}', "seconds must be"),
        (b'{"epoch": 1, "val_loss": "low"}', "val_loss must be"),
        (b'{"epoch": 1, "finished": 0}', "finished must be"),
        (b'{"checkpoint": 3}', "checkpoint must be"),
        (b'{"checkpoint": "x", "samples": 10}', "epoch must be"),
    ],
)
def test_other_lines_are_refused_by_their_rule(line, rule):
    with pytest.raises(WrongReportError, match=rule):
        parse_report(line)


def test_lines_are_put_together_and_never_grow_without_end():
    assert whole_lines(b"on") == ([], b"on")
    assert whole_lines(b"one\n\ntwo\nthr") == ([b"one", b"two"], b"thr")
    assert whole_lines(b"x" * (MAX_LINE_BYTES + 1)) == ([b"x" * (MAX_LINE_BYTES + 1)], b"")


def test_a_terminal_obeys_nothing_that_is_shown():
    assert printable(b"\x1b[2Jred\xff" + b"x" * 100) == f"?[2Jred\ufffd{'x' * 72}"
