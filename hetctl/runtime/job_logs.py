"""Log files of a job: readable by the owner alone, and written as far as the disk has room."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

from hetctl.model.errors import DISK_FULL_ERRORS, is_transient
from hetctl.model.events import ExitReason
from hetctl.storage.atomic_io import file_mode

LONGEST_OUTPUT = 2**18
"""Bytes at the end of a log that are searched for the cause of a step's end."""


def log_line(text: str) -> None:
    """Print a line to the log; disk errors are ignored."""
    with contextlib.suppress(OSError):
        # After ENOSPC, print() would keep the text and fail with it again, at the exit at the latest.
        os.writev(1, [f"{text}\n".encode()])


def disk_error_reason(error: OSError) -> str:
    """Return the exit reason of a job for a disk error."""
    if error.errno in DISK_FULL_ERRORS:
        return ExitReason.DISK_FULL.value
    return ExitReason.DISK_ERROR.value if is_transient(error) else f"{error.strerror}: {error.filename}"


def private_log(path: Path) -> BinaryIO:
    """Open a file for appending, with access for the owner alone, or for the folder's group."""
    # O_APPEND keeps the lines of several processes apart, except on NFS (open(2)).
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if os.fstat(descriptor).st_uid == os.geteuid():
        os.fchmod(descriptor, file_mode(path.parent))
    return os.fdopen(descriptor, "ab")


def append(log: Path, text: str) -> None:
    """Append a text to a log."""
    with private_log(log) as file:
        file.write(text.encode())


def end_of(log: Path, start: int) -> str | None:
    """Return the end of what was written to a log after offset `start`; None while the disk does not answer.

    The log may not exist yet.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - LONGEST_OUTPUT))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        if not is_transient(error):
            raise
        return None


def length_of(log: Path) -> int:
    """Return the length of a log in bytes; 0 if it does not exist yet."""
    try:
        return log.stat().st_size
    except FileNotFoundError:
        return 0
