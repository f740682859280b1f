"""Reports of scripts: lines of JSON, and what is none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hetctl import script
from hetctl.model.script_variables import PROGRESS_VARIABLE, STOP_VARIABLE
from hetctl.runtime.worker.script_reports import (
    LONGEST_LINE,
    ReportLines,
    ScriptReport,
    WrongReportError,
    parse_report,
    shown,
)

ALONE = """
import hetctl, sys
hetctl.report(epoch=1, val_loss=0.5)
assert not hetctl.should_stop()
print(*({"numpy", "yaml", "pydantic", "torch", "tensorflow", "click"} & set(sys.modules)))
"""


def test_what_a_script_reports_is_read_back(monkeypatch):
    source, target = os.pipe()
    monkeypatch.setenv(PROGRESS_VARIABLE, str(target))
    script.report(epoch=3, samples=100, val_loss=0.5)
    os.close(target)
    with os.fdopen(source, "rb") as file:
        (line,) = file
    assert parse_report(line) == ScriptReport(3, {"val_loss": 0.5}, 100.0)
    # Nobody reads any more.
    script.report(epoch=4)


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
    ],
)
def test_other_lines_are_refused_by_their_rule(line, rule):
    with pytest.raises(WrongReportError, match=rule):
        parse_report(line)


def test_lines_are_put_together_and_never_grow_without_end():
    lines = ReportLines()
    assert list(lines.add(b"on")) == []
    assert list(lines.add(b"e\n\ntwo\nthr")) == [b"one", b"two"]
    assert list(lines.add(b"x" * LONGEST_LINE)) == [b"thr" + b"x" * LONGEST_LINE]
    assert list(lines.add(b"four\n")) == [b"four"]


def test_a_terminal_obeys_nothing_that_is_shown():
    assert shown(b"\x1b[2Jred\xff" + b"x" * 100) == f"?[2Jred\ufffd{'x' * 72}"
