"""A batch job for tests of its driver, with trainers that only pretend to train."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
from one_driver import problems
from whole_folds import progress_in
from workbench import alive, python_without_training, wait_for

from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.events import DRIVER
from hetctl.model.profile import MemberProfile
from hetctl.model.run import RunSpec
from hetctl.model.site import Queue, Site
from hetctl.runtime.driver.driver import Driver
from hetctl.scheduling.planners import PLANNERS
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import write_spec

FUNCTIONS = Functions("nets:input_fn", "nets:model_fn")


@contextmanager
def captured() -> Iterator[TextIO]:
    """Have this process and those that it starts write to a file."""
    with tempfile.TemporaryFile("w+") as file:
        streams = {number: os.dup(number) for number in (1, 2)}
        try:
            for number in streams:
                os.dup2(file.fileno(), number)
            yield file
        finally:
            for number, stream in streams.items():
                os.dup2(stream, number)
                os.close(stream)


class Job:
    """One batch job of a run, on a local site with a number of slots."""

    def __init__(
        self,
        folder: Path,
        members: dict[str, dict],
        *,
        slots: int = 2,
        rates=None,
        max_gpus: int = 1,
        ensemble: Ensemble | None = None,
        site: Site | None = None,
        memory: int = 2**40,
        **spec,
    ) -> None:
        self.folder = folder
        self.python = python_without_training(folder)
        self.environment: dict[str, str] = {}
        self.run = RunFolder(folder / "runs" / "r")
        local = Site("local", "local", "local", 1, slots, slots, memory, (Queue("local"),), device="slot")
        pretended = tuple(Member(n, c, max_gpus=max_gpus) for n, c in members.items())
        known = {name: (rates or {}).get(name, {1: 100.0}) for name in members}
        profiles = tuple(MemberProfile(name, known[name], None, 10) for name in members)
        defaults = {"planner": "flotilla", "gpus": slots, "wall_s": 3600, "grace_s": 10, "profiles": profiles}
        self.run.create()
        self.spec = RunSpec(
            run="r",
            ensemble=ensemble or Ensemble("e", "tensorflow", FUNCTIONS, pretended, "/x"),
            site=site or local,
            queue="local",
            checkpoints=str(folder / "checkpoints"),
            **defaults | spec,
        )
        write_spec(self.run, self.spec)

    def start(self, number: int = 0, started: float | None = None, **environment: str) -> subprocess.Popen:
        deadline = (started or time.time()) + self.spec.wall_s - self.spec.grace_s
        command = [
            self.python, "-m", "hetctl.runtime.driver", self.run.path,
            "--job", str(number), "--deadline", str(deadline), "--batch-id", "17",
        ]  # fmt: skip
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **self.environment, **environment},
        )

    def drive(self, number: int = 0, started: float | None = None) -> str:
        """Run a job to its end, in this process; return what the driver said."""
        deadline = (started or time.time()) + self.spec.wall_s - self.spec.grace_s
        with pytest.MonkeyPatch.context() as patch, captured() as said:
            patch.setattr(sys, "executable", str(self.python))
            for name, value in self.environment.items():
                patch.setenv(name, value)
            reason = Driver(self.run, number, deadline, "17").run()
            said.seek(0)
            output = said.read()
        self.leaves_nothing_behind()
        assert "Traceback" not in output, output
        return f"{output}ended: {reason}"

    def drive_by(
        self, planner, monkeypatch, number: int = 0, *, real: bool = False, seconds: float | None = None
    ) -> None:
        """The same by a planner of the test's own; `real`: really train."""
        monkeypatch.setitem(PLANNERS, self.spec.planner, planner)
        if real:
            self.python = sys.executable
        started = None if seconds is None else time.time() + seconds - self.spec.wall_s + self.spec.grace_s
        self.drive(number, started)

    def leaves_nothing_behind(self) -> None:
        # The kernel ends ranks with their agents, not before the driver has ended.
        wait_for(lambda: not alive(str(self.run.path)))
        held: dict[tuple[str, int, int], str] = {}
        for event in (e for e in events_in(self.run) if e.source == DRIVER):
            member = event.data.get("member")
            if event.kind == "task_started":
                places = event.data["placement"]
                ours = [(p["node"], gpu, p.get("seat", 0)) for p in places for gpu in p["gpus"]]
                assert not set(ours) & set(held), (member, held)
                held |= dict.fromkeys(ours, member)
            elif event.kind == "task_ended":
                held = {gpu: holder for gpu, holder in held.items() if holder != member}
        assert not held
        if self.spec.ensemble.search is None:
            assert problems(events_in(self.run)) == []

    def events(self, kind: str, source: str = DRIVER) -> list:
        return [e for e in events_in(self.run) if e.kind == kind and e.source == source]

    def task_gpus(self, member: str) -> list[int]:
        """GPUs of a member's tasks, one after another."""
        return [e.data["gpus"] for e in self.events("task_started") if e.data["member"] == member]

    def reasons(self, member: str) -> list[str]:
        """Why a member was stopped, each time."""
        return [event.data["reason"] for event in self.events("stopped", member)]

    @property
    def reason(self) -> str:
        return self.events("job_ended")[-1].data["reason"]

    def rounds(self) -> list[list[str]]:
        return [event.data["members"] for event in self.events("round_started")]

    def progress(self):
        return progress_in(self.run, self.spec.ensemble, self.spec.retries)

    def trained(self, member: str) -> list[int]:
        """Epochs that a member trained, without those that it only reported again."""
        epochs = self.events("epoch", member)
        return [event.data["epoch"] for event in epochs if "evaluate_s" in event.data]
