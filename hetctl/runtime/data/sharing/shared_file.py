"""Files in which processes of a node share memory: made whole by the first one, and mapped by all."""

from __future__ import annotations

import mmap
import os
import threading
import uuid
from contextlib import suppress
from pathlib import Path

from hetctl.model.errors import BadInputError


def create(path: Path, head: bytes, size: int) -> None:
    """Make a private file that begins with `head`, unless there is one; it takes no space yet."""
    own = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(head)
            file.truncate(size)
        with suppress(FileExistsError):
            # link(2) fails where the name exists; rename(2) would replace a file that others have mapped.
            os.link(own, path)
    finally:
        own.unlink(missing_ok=True)


def map_whole(path: Path, content: str, hint: str) -> mmap.mmap:
    """Map a file after all of its space is allocated: a write without free space would kill the process.

    Parameters
    ----------
    content, hint : str
        Name of the file's content, and the next step if there is no room for it.

    Raises
    ------
    BadInputError
        If it is empty, or there is too little space; it is removed then.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not status.st_size:
            raise BadInputError(f"{path} is empty", "remove it if nothing uses it")
        free = _free_bytes(path.parent)
        try:
            if status.st_size - 512 * status.st_blocks > free:
                raise OSError
            # A write to a mapped page for which there is no space ends the process by SIGBUS (mmap(2)).
            os.posix_fallocate(descriptor, 0, status.st_size)
        except OSError:
            path.unlink(missing_ok=True)
            raise BadInputError(
                f"{content} needs {status.st_size / 2**20:,.1f} MiB, and {path.parent} has"
                f" {free / 2**20:,.1f} MiB free",
                hint,
            ) from None
        return mmap.mmap(descriptor, status.st_size)
    finally:
        os.close(descriptor)


def fence() -> None:
    """Act as a memory barrier, since some processors reorder reads and writes.

    A word that announces data must be written after the data, and read before them.
    """
    # Taking and releasing a lock are barriers in one direction each; two pairs in a row are one in both.
    for _ in range(2):
        with threading.Lock():
            pass


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
