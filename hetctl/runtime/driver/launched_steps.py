"""Steps as processes, started through the site's launcher, each with a log and an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from hetctl.cluster.launchers import LaunchSpec
from hetctl.runtime.job_logs import private_log


class EndedStep(NamedTuple):
    """A step with its exit code, 128 + n if signal n ended it."""

    name: str
    exit_code: int


class StepPool:
    """The running steps of one batch job."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def launch(self, step: LaunchSpec, log: Path) -> None:
        """Start a step and append its output to `log`."""
        with private_log(log) as output:
            # srun(1) would read standard input for its tasks (--input).
            self._running[step.name] = subprocess.Popen(
                step.argv,
                env={**os.environ, **step.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def reap(self) -> list[EndedStep]:
        """Return the steps that have ended since the last call."""
        codes = ((name, process.poll()) for name, process in self._running.items())
        found = ((name, code) for name, code in codes if code is not None)
        ended = [EndedStep(name, code if code >= 0 else 128 - code) for name, code in found]
        for step in ended:
            del self._running[step.name]
        return ended

    def end(self, patience_s: float) -> list[EndedStep]:
        """Wait for all steps; send SIGTERM after `patience_s` seconds, SIGKILL after as long again."""
        ended: list[EndedStep] = []
        for number in (signal.SIGTERM, signal.SIGKILL):
            limit = time.monotonic() + patience_s
            while self._running and time.monotonic() < limit:
                ended += self.reap()
                time.sleep(0.01)
            for process in self._running.values():
                process.send_signal(number)
        return ended

    def signal(self, number: signal.Signals, name: str) -> None:
        """Send a signal to the step of that name, if it still runs."""
        if process := self._running.get(name):
            process.send_signal(number)
