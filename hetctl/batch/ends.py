"""How local jobs ended, as their supervisors wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def end_file(folder: Path, pid: int) -> Path:
    """Return where the end of a job is kept: its exit code, and why it was ended if it was."""
    return folder / f"{pid}.json"


def read_end(folder: Path, pid: int) -> dict[str, Any] | None:
    """Return what a supervisor wrote, or None if it has not."""
    try:
        end: dict[str, Any] = json.loads(end_file(folder, pid).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return end
