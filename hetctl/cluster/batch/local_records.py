"""What is kept of local jobs: who supervises them, and how they ended."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hetctl.model.serialization import decode, encode
from hetctl.storage.atomic_io import write_json
from hetctl.storage.processes import HostBoot, Process

T = TypeVar("T")


@dataclass(frozen=True)
class Claim:
    """Who runs a job; the one supervisor that has written it, of all that may have tried.

    Parameters
    ----------
    script : Process or None
        The job's own first process, which leads its group; None as long as the job is pending.
    """

    machine: HostBoot
    supervisor: Process
    script: Process | None = None


@dataclass(frozen=True)
class End:
    """How a job ended.

    Parameters
    ----------
    exit_code : int or None
        None if it never started; 128 + n if signal n ended it.
    ended_by : str or None
        ``timeout`` or ``cancelled`` if it did not end by itself.
    detail : str
        Why, in words.
    """

    exit_code: int | None
    ended_by: str | None = None
    detail: str = ""


def claim(folder: Path, job: str, claimed: Claim) -> bool:
    """Claim a job, whole and at once; False if another supervisor has it."""
    temporary = folder / f".{job}.{os.getpid()}.claim"
    write_json(temporary, encode(claimed))
    try:
        os.link(temporary, claim_file(folder, job))
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def claim_file(folder: Path, job: str) -> Path:
    """Return where the claim of a job is kept."""
    return folder / f"{job}.claim"


def end_file(folder: Path, job: str) -> Path:
    """Return where the end of a job is kept."""
    return folder / f"{job}.end"


def read_claim(folder: Path, job: str) -> Claim | None:
    """Return who runs a job; None if nobody has claimed it."""
    return _read(claim_file(folder, job), Claim)


def read_end(folder: Path, job: str) -> End | None:
    """Return how a job ended; None if its supervisor has not written it."""
    return _read(end_file(folder, job), End)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return decode(kind, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
