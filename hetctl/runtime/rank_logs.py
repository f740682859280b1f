"""Log files that several processes append to, readable by the owner alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

LONGEST_OUTPUT = 2**18
"""Bytes at the end of a log that are searched for the cause of a step's end."""


def private_log(path: Path) -> BinaryIO:
    """Open a file for appending, with access for the owner alone."""
    # O_APPEND keeps the lines of several processes apart, except on NFS (open(2)).
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def append(log: Path, text: str) -> None:
    """Append a text to a log."""
    with private_log(log) as file:
        file.write(text.encode())


def end_of(log: Path, start: int) -> str:
    """Return the end of what was written to a log after offset `start`; the log may not exist yet."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - LONGEST_OUTPUT))
        return file.read().decode(errors="replace")
