"""Where everything lies below ``$HETCTL_HOME``: the one place that knows file names."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUND_NAME = re.compile(r"round-(\d{4,})$")


def make_private_folder(path: Path) -> Path:
    """Create a folder and its parents that only the owner can read, whatever the umask."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
    return missing[0] if missing else path


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step, readable by the owner alone: no reader ever sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as `write_private` does."""
    write_private(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


@dataclass(frozen=True)
class RoundFolder:
    """``runs/<run>/round-0000/``: all that a compute node reads and writes, but for checkpoints."""

    path: Path

    @property
    def index(self) -> int:
        """The round's number, from the folder's name."""
        match = ROUND_NAME.search(self.path.name)
        assert match is not None
        return int(match.group(1))

    @property
    def file(self) -> Path:
        """What the trainers of the round read; absent until the round has been planned."""
        return self.path / "round.json"

    @property
    def script(self) -> Path:
        """The batch script of the job that ran the round."""
        return self.path / "job.sh"

    @property
    def events(self) -> Path:
        """One file of JSON lines per member, and the driver's."""
        return self.path / "events"

    @property
    def logs(self) -> Path:
        """Output of the job and of each step."""
        return self.path / "logs"

    def events_of(self, member: str) -> Path:
        """Return the file of a member's events."""
        return self.events / f"{member}.jsonl"

    def log_of(self, member: str) -> Path:
        """Output of a member's step."""
        return self.logs / f"{member}.log"

    @property
    def exchange_log(self) -> Path:
        """Output of the leaders of a round in lockstep on several nodes."""
        return self.logs / "exchange.log"

    def create(self) -> RoundFolder:
        """Make the folder and those in it."""
        for folder in (self.path, self.events, self.logs):
            make_private_folder(folder)
        return self


@dataclass(frozen=True)
class RunFolder:
    """``runs/<run>/``."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def spec(self) -> Path:
        """The run as submitted, with later changes."""
        return self.path / "run.json"

    def job_stop(self, number: int) -> Path:
        """Return what a job's script writes when its end is near; the text says why, and may be missing."""
        return self.path / f"stop-job-{number:04d}"

    def pulses(self, number: int) -> Path:
        """Return the file of live metrics of a job's members, there while it runs."""
        return self.path / f"pulses-job-{number:04d}.json"

    def claim(self, number: int) -> Path:
        """Return the file, made by a job's script, with the batch system's number of that job."""
        return self.path / "claims" / f"job-{number:04d}"

    def board_of(self, member: str) -> Path:
        """Return the folder of a member's event files for TensorBoard."""
        return self.path / "tensorboard" / member

    def round(self, index: int) -> RoundFolder:
        """Return the folder of a round, existing or not."""
        return RoundFolder(self.path / f"round-{index:04d}")

    def rounds(self) -> list[RoundFolder]:
        """Return the folders of all rounds so far, in order."""
        found = [RoundFolder(p) for p in self.path.glob("round-*") if ROUND_NAME.search(p.name)]
        return sorted(found, key=lambda folder: folder.index)

    def next_index(self) -> int:
        """Return the first index that no folder has."""
        rounds = self.rounds()
        return rounds[-1].index + 1 if rounds else 0


@dataclass(frozen=True)
class Home:
    """``$HETCTL_HOME``, else ``.hetctl`` of the project."""

    path: Path

    @property
    def catalog(self) -> Path:
        """The SQLite file; only the login side opens it."""
        return self.path / "catalog.db"

    @property
    def lock(self) -> Path:
        """Held by the one process that may write."""
        return self.path / "lock"

    @property
    def runs(self) -> Path:
        """Folder of all runs."""
        return self.path / "runs"

    @property
    def profiles(self) -> Path:
        """Folders of profiling jobs."""
        return self.path / "profiles"

    def run(self, name: str) -> RunFolder:
        """Return a run's folder, existing or not."""
        return RunFolder(self.runs / name)

    def checkpoints(self, run: str, member: str) -> Path:
        """Return the folder of a member's checkpoints; runs never share checkpoints."""
        return self.path / "checkpoints" / member / run
