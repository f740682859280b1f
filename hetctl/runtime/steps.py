"""Steps as processes: launched through the site's launcher, each with its log and exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetctl.control.ends import CAUSES
from hetctl.core.ends import Why
from hetctl.core.layout import write_private
from hetctl.core.plan import Allocation
from hetctl.core.site import Node, Site
from hetctl.launchers import LAUNCHERS
from hetctl.runtime.step import LAUNCHED_AT

LONGEST_OUTPUT = 2**18
"""Bytes of a step's output, from its end, that are looked at for why it ended."""


@dataclass(frozen=True)
class RunningStep:
    """A step that has not been seen to end."""

    name: str
    allocation: Allocation
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int


@dataclass(frozen=True)
class EndedStep:
    """A step with its exit code (128 + n if signal n ended it) and the end of its output."""

    name: str
    allocation: Allocation
    exit_code: int
    output: str

    def cause(self, why: Why) -> str:
        """Say in words how the step ended."""
        if why in CAUSES:
            return CAUSES[why]
        if self.exit_code > 128:
            return f"killed by {_signal_name(self.exit_code - 128)}"
        return f"exit code {self.exit_code}"


class StepPool:
    """The steps of one batch job and the GPUs they hold."""

    def __init__(self, site: Site, nodes: Sequence[Node]) -> None:
        self._site = site
        self.nodes = tuple(nodes)
        self._running: list[RunningStep] = []

    @property
    def running(self) -> tuple[RunningStep, ...]:
        """Steps that still hold their GPUs."""
        return tuple(self._running)

    @property
    def gpus(self) -> int:
        """GPUs on all nodes."""
        return sum(len(node.gpus) for node in self.nodes)

    def free_nodes(self) -> tuple[Node, ...]:
        """Return the nodes with the GPUs that no step holds, without full nodes."""
        held = {gpu for step in self._running for gpu in _gpus_of(step.allocation)}
        free = (replace(n, gpus=tuple(g for g in n.gpus if (n.name, g) not in held)) for n in self.nodes)
        return tuple(node for node in free if node.gpus)

    def can_hold(self, allocation: Allocation) -> bool:
        """Whether no step of the member runs, and none holds any of these GPUs."""
        wanted = set(_gpus_of(allocation))
        return all(
            step.name != allocation.member and wanted.isdisjoint(_gpus_of(step.allocation))
            for step in self._running
        )

    def launch(self, name: str, allocation: Allocation, command: Sequence[str], log: Path) -> None:
        """Start a step; its output is appended to `log`."""
        step = LAUNCHERS[self._site.launcher](self._site, allocation, tuple(command))
        environment = {**os.environ, **step.environment, LAUNCHED_AT: repr(time.time())}
        if step.file is not None:
            file = log.with_suffix(".launch")
            write_private(file, "\n".join(step.file) + "\n")
            environment[step.file_variable] = str(file)
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            start = output.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                step.argv, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self._running.append(RunningStep(name, allocation, process, log, start))

    def reap(self) -> list[EndedStep]:
        """Return the steps that have ended since the last call; their GPUs are free."""
        over = [step for step in self._running if step.process.poll() is not None]
        self._running = [step for step in self._running if step not in over]
        return [
            EndedStep(s.name, s.allocation, _exit_code(s.process.returncode), _end_of(s.log, s.log_start))
            for s in over
        ]

    def signal(self, number: signal.Signals, name: str | None = None) -> None:
        """Send a signal to the step of that name, or to every step that is left."""
        for step in self._running:
            if name in (None, step.name):
                step.process.send_signal(number)


def _gpus_of(allocation: Allocation) -> Iterator[tuple[str, int]]:
    return ((place.node, gpu) for place in allocation.placement for gpu in place.gpus)


def _end_of(log: Path, start: int) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - LONGEST_OUTPUT))
        return file.read().decode(errors="replace")


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
