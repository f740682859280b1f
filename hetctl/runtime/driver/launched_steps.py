"""The nodes of a job, and its steps: processes of the site's launcher, each with a log and an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from hetctl.cluster.launchers import LaunchSpec
from hetctl.cluster.launchers.nodes import nodes_command, parse_gpus, parse_nodes
from hetctl.model.errors import BatchSystemError
from hetctl.model.site import Node, Site
from hetctl.runtime.job_logs import private_log


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

    def reap(self) -> dict[str, int]:
        """Return the exit codes of the steps that have ended since the last call, 128 + n for signal n."""
        codes = {name: process.poll() for name, process in self._running.items()}
        ended = {name: code if code >= 0 else 128 - code for name, code in codes.items() if code is not None}
        for name in ended:
            del self._running[name]
        return ended

    def end(self, patience_s: float) -> dict[str, int]:
        """Wait for all steps; send SIGTERM after `patience_s` seconds, SIGKILL after as long again."""
        ended: dict[str, int] = {}
        for number in (signal.SIGTERM, signal.SIGKILL):
            limit = time.monotonic() + patience_s
            while self._running and time.monotonic() < limit:
                ended |= self.reap()
                time.sleep(0.01)
            for process in self._running.values():
                process.send_signal(number)
        return ended

    def signal(self, number: signal.Signals, name: str) -> None:
        """Send a signal to the step of that name, if it still runs."""
        if process := self._running.get(name):
            process.send_signal(number)


def nodes_of_this_job(site: Site, gpus: int | None = None) -> tuple[Node, ...]:
    """Return the nodes of this job from the batch system, each with all its GPUs, except in local jobs.

    `gpus` limits the GPUs in use: the last node then has fewer.

    Raises
    ------
    BatchSystemError
        If this process is not inside a job of the site's batch system.
    """
    command = nodes_command(site)
    try:
        output = ""
        if command:
            output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BatchSystemError(f"cannot list the nodes of this job on site {site.name}: {error}") from None
    names = parse_nodes(site, os.environ, output)
    on_node = parse_gpus(site, os.environ)
    left = [max(0, (gpus or site.gpus) - len(on_node) * index) for index in range(len(names))]
    return tuple(
        Node(name, on_node[:n], site.type_of(name)) for name, n in zip(names, left, strict=True) if n > 0
    )
