"""Steps as processes: launched through the site's launcher, each with its log and exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hetctl.launchers import Step

LONGEST_OUTPUT = 2**18
"""Bytes of a step's output, from its end, that are looked at for why it ended."""


@dataclass(frozen=True)
class RunningStep:
    """A step that has not been seen to end."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int


@dataclass(frozen=True)
class EndedStep:
    """A step with its exit code (128 + n if signal n ended it) and the end of its output."""

    name: str
    exit_code: int
    output: str


class StepPool:
    """The steps of one batch job."""

    def __init__(self) -> None:
        self._running: list[RunningStep] = []

    def launch(self, step: Step, log: Path) -> None:
        """Start a step; its output is appended to `log`."""
        environment = {**os.environ, **step.environment}
        with private_log(log) as output:
            start = output.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                step.argv, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self._running.append(RunningStep(step.name, process, log, start))

    def reap(self) -> list[EndedStep]:
        """Return the steps that have ended since the last call."""
        over = [step for step in self._running if step.process.poll() is not None]
        self._running = [step for step in self._running if step not in over]
        return [EndedStep(s.name, _exit_code(s.process.returncode), end_of(s.log, s.log_start)) for s in over]

    def end(self, patience_s: float) -> list[EndedStep]:
        """Wait for all steps; terminate and then kill those that take longer than `patience_s` each time."""
        ended: list[EndedStep] = []
        for number in (signal.SIGTERM, signal.SIGKILL):
            limit = time.monotonic() + patience_s
            while self._running and time.monotonic() < limit:
                ended += self.reap()
                time.sleep(0.01)
            for step in self._running:
                step.process.send_signal(number)
        return ended

    def signal(self, number: signal.Signals, name: str) -> None:
        """Send a signal to the step of that name, if it runs."""
        for step in self._running:
            if step.name == name:
                step.process.send_signal(number)


def private_log(path: Path) -> BinaryIO:
    """Open a file to append to, for the owner alone."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def append(log: Path, text: str) -> None:
    """Add to a log what belongs there."""
    with private_log(log) as file:
        file.write(text.encode())


def end_of(log: Path, start: int) -> str:
    """Return the end of what was written to a log behind a place; a log may not have been begun."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - LONGEST_OUTPUT))
        return file.read().decode(errors="replace")


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code
