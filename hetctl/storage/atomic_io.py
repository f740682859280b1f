"""Files and folders that only their owner can read, written completely or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def make_private_folder(path: Path) -> Path:
    """Create a folder and its parents that only the owner can read, independent of the umask."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        # The umask may take bits from the mode of mkdir(2), hence chmod(2).
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
    return missing[0] if missing else path


@contextmanager
def private_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` atomically at the end, readable by the owner alone.

    A reader never sees a partial file. After an error the old file is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            yield file
            file.flush()
            # rename(2) is atomic for readers, but does not order data: after a crash the file could be empty.
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically, readable by the owner alone; a reader never sees a partial file."""
    with private_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as `write_private` does."""
    # Python would write NaN, which is no JSON and which other programs refuse.
    write_private(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
