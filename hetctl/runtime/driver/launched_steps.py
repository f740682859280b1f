"""Steps as processes, started through the site's launcher, each with a log and an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from hetctl.cluster.launchers import LaunchSpec
from hetctl.model.errors import is_transient
from hetctl.runtime.job_logs import end_of, private_log


@dataclass(frozen=True)
class RunningStep:
    """A step whose end has not been seen yet."""

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
    """The running steps of one batch job."""

    def __init__(self) -> None:
        self._running: list[RunningStep] = []

    def launch(self, step: LaunchSpec, log: Path) -> None:
        """Start a step and append its output to `log`."""
        environment = {**os.environ, **step.environment}
        with private_log(log) as output:
            start = output.seek(0, os.SEEK_END)
            # srun(1) reads its standard input and passes it on to its tasks (--input).
            process = subprocess.Popen(
                step.argv, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self._running.append(RunningStep(step.name, process, log, start))

    def reap(self) -> list[EndedStep]:
        """Return the steps that have ended since the last call."""
        ended: list[EndedStep] = []
        for step in [step for step in self._running if step.process.poll() is not None]:
            try:
                output = end_of(step.log, step.log_start)
            except OSError as error:
                if not is_transient(error):
                    raise
                continue  # Its log says why it has ended: it counts as running until that can be read.
            self._running.remove(step)
            ended.append(EndedStep(step.name, _exit_code(step.process.returncode), output))
        return ended

    def end(self, patience_s: float) -> list[EndedStep]:
        """Wait for all steps; send SIGTERM after `patience_s` seconds, and SIGKILL after as long again."""
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
        """Send a signal to the step of that name, if it still runs."""
        for step in self._running:
            if step.name == name:
                step.process.send_signal(number)


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code
