"""Logs: files that several processes append to, for the owner alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

LONGEST_OUTPUT = 2**18
"""Bytes of a log, from its end, that are looked at for why a step ended."""


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
