"""Records of local jobs: their supervisors and their results."""

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
    """Claim of a job by a supervisor; of all supervisors that try, only one writes it.

    Parameters
    ----------
    script : Process or None
        First process of the job, leader of its process group; None while the job is pending.
    """

    machine: HostBoot
    supervisor: Process
    script: Process | None = None


@dataclass(frozen=True)
class End:
    """Result of a job that has ended.

    Parameters
    ----------
    exit_code : int or None
        Exit code; None if the job never started; 128 + n if signal n ended it.
    ended_by : str or None
        Cause of the end: ``timeout`` or ``cancelled``; None if the job ended by itself.
    detail : str
        Reason in words.
    """

    exit_code: int | None
    ended_by: str | None = None
    detail: str = ""


def claim(folder: Path, job: str, claimed: Claim) -> bool:
    """Claim a job atomically; return False if another supervisor has claimed it."""
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
    """Return the path of the claim of a job."""
    return folder / f"{job}.claim"


def end_file(folder: Path, job: str) -> Path:
    """Return the path of the result of a job."""
    return folder / f"{job}.end"


def read_claim(folder: Path, job: str) -> Claim | None:
    """Return the claim of a job; None if it is not claimed."""
    return _read(claim_file(folder, job), Claim)


def read_end(folder: Path, job: str) -> End | None:
    """Return the result of a job; None if its supervisor has not written it."""
    return _read(end_file(folder, job), End)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return decode(kind, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
