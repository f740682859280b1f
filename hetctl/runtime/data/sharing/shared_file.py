"""Files in which processes of a node share memory, and locks on their bytes.

The first process makes a file whole, and all map it. The kernel releases locks when their holder dies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
import weakref
from contextlib import closing, suppress
from pathlib import Path

from hetctl.model.errors import TransientInputError
from hetctl.storage.atomic_io import draft

FORM = "hhqqi"
"""Format of fcntl(2)'s ``struct flock``: type, whence, start, length, process (0 for these locks)."""

CLOSED = -1
POLL_S = 0.05
"""Seconds between two checks of a trainer for the announcement of a leader."""


def create(path: Path, head: bytes, size: int) -> None:
    """Make a private file that begins with `head`, unless there is one; it takes no space yet."""
    with draft(path) as own:
        with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(head)
            file.truncate(size)
        with suppress(FileExistsError):
            # link(2) fails where the name exists; rename(2) would replace a file that others have mapped.
            os.link(own, path)


def map_whole(path: Path, content: str, hint: str) -> mmap.mmap:
    """Map a file after all of its space is allocated: a write without free space would kill the process.

    Parameters
    ----------
    content, hint : str
        Name of the file's content, and the next step if there is no room for it.

    Raises
    ------
    TransientInputError
        If it is empty, or there is too little space; it is removed then.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not status.st_size:
            raise TransientInputError(f"{path} is empty", "remove it if nothing uses it")
        free = _free_bytes(path.parent)
        try:
            if status.st_size - 512 * status.st_blocks > free:
                raise OSError
            # A write to a mapped page for which there is no space ends the process by SIGBUS (mmap(2)).
            os.posix_fallocate(descriptor, 0, status.st_size)
        except OSError:
            path.unlink(missing_ok=True)
            raise TransientInputError(
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


class ByteLocks:
    """Locks on single bytes of a file, held until released, the object is closed, or its process dies.

    They are open file description locks of fcntl(2): they belong to the object, not to the process,
    so two objects of one process exclude each other, and closing one does not affect the other.
    A forked child would hold them as well, so its copy of the object is closed at once.

    Parameters
    ----------
    path : Path
        File on a local file system of this machine, with any content and length.
    """

    # A default of the class: __del__ runs even if open(2) has failed in __init__.
    _descriptor = CLOSED

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        _OPEN.add(self)

    def __del__(self) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True if the object is closed and holds no locks."""
        return self._descriptor == CLOSED

    def acquire(self, byte: int) -> bool:
        """Lock a byte without waiting, unless this object holds it; return false if another object does."""
        try:
            # With F_SETLK, closing any descriptor of the file would drop all locks of the process (fcntl(2)).
            self._call(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte)
        except BlockingIOError:
            return False
        return True

    def release(self, byte: int) -> None:
        """Unlock a byte."""
        self._call(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def held_by_another(self, byte: int) -> bool:
        """Return true if another object has locked a byte."""
        kind: int = struct.unpack(FORM, self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte))[0]
        return kind != fcntl.F_UNLCK

    def close(self) -> None:
        """Release all locks."""
        if not self.closed:
            os.close(self._descriptor)
            self._descriptor = CLOSED

    def _call(self, command: int, kind: int, byte: int) -> bytes:
        if self.closed:
            raise TransientInputError(
                f"{self._path} was closed, or opened before this process was forked",
                "open it again in this process",
            )
        return fcntl.fcntl(self._descriptor, command, struct.pack(FORM, kind, os.SEEK_SET, byte, 1, 0))


_OPEN: weakref.WeakSet[ByteLocks] = weakref.WeakSet()


def _close_in_child() -> None:
    for locks in list(_OPEN):
        locks.close()


os.register_at_fork(after_in_child=_close_in_child)


def announce(ring: Path) -> ByteLocks:
    """Announce that this process fills a ring, until the result is closed or the process dies.

    The file gets its name only after it is locked: if it is not locked, the service is over.
    """
    path = _leader_file(ring)
    with draft(path) as own:
        os.close(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        locks = ByteLocks(own)
        locks.acquire(0)
        own.replace(path)
    return locks


def leader_fills(ring: Path) -> bool:
    """Return true if a living leader fills the ring."""
    with suppress(FileNotFoundError), closing(ByteLocks(_leader_file(ring))) as locks:
        return locks.held_by_another(0)
    return False


def await_exchange(ring: Path, timeout_s: float) -> bool:
    """Wait for a leader that has not started; return true if one fills the ring."""
    limit = time.monotonic() + timeout_s
    while not _leader_file(ring).exists() and time.monotonic() < limit:
        time.sleep(POLL_S)
    return leader_fills(ring)


def _leader_file(ring: Path) -> Path:
    return ring.with_name(f"{ring.name}.leader")
