"""Locks that the kernel drops when their holder dies, however it dies: one on each byte of a file."""

from __future__ import annotations

import fcntl
import os
import struct
import weakref
from pathlib import Path

from hetctl.model.errors import BadInputError

FORM = "hhqqi"
"""Of fcntl(2)'s ``struct flock``: type, whence, start, length, process (0 for these locks)."""

CLOSED = -1


class ByteLocks:
    """Locks on single bytes of a file, held until dropped, the object is closed, or its process dies.

    They are open file description locks of fcntl(2): they belong to the object rather than to the
    process, so two objects of one process exclude each other, and closing one leaves the other alone.
    A forked child would hold them as well, so its copy of the object is closed at once.

    Parameters
    ----------
    path : Path
        On a file system of this machine. What the file holds does not matter, nor how long it is.
    """

    _descriptor = CLOSED

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        _OPEN.add(self)

    def __del__(self) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether nothing is held any more."""
        return self._descriptor == CLOSED

    def take(self, byte: int) -> bool:
        """Lock a byte without waiting, unless it is ours already; False if another object has it."""
        try:
            self._call(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte)
        except BlockingIOError:
            return False
        return True

    def drop(self, byte: int) -> None:
        """Unlock a byte."""
        self._call(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def held_by_another(self, byte: int) -> bool:
        """Whether another object has a byte locked."""
        kind: int = struct.unpack(FORM, self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte))[0]
        return kind != fcntl.F_UNLCK

    def fence(self) -> None:
        """Order what this thread reads and writes before and after, on processors that do not by themselves.

        While anything is held, asking for a lock takes a lock of the kernel's; nothing passes two of those.
        """
        self.held_by_another(0)
        self.held_by_another(0)

    def close(self) -> None:
        """Drop all locks."""
        if not self.closed:
            os.close(self._descriptor)
            self._descriptor = CLOSED

    def _call(self, command: int, kind: int, byte: int) -> bytes:
        if self.closed:
            raise BadInputError(
                f"{self._path} was closed, or opened before this process was forked",
                "open it anew in this process",
            )
        return fcntl.fcntl(self._descriptor, command, struct.pack(FORM, kind, os.SEEK_SET, byte, 1, 0))


_OPEN: weakref.WeakSet[ByteLocks] = weakref.WeakSet()


def _close_in_child() -> None:
    for locks in list(_OPEN):
        locks.close()


os.register_at_fork(after_in_child=_close_in_child)
