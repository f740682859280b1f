"""Locks on single bytes of a file, which the kernel releases when their holder dies in any way."""

from __future__ import annotations

import fcntl
import os
import struct
import weakref
from pathlib import Path

from hetctl.model.errors import BadInputError

FORM = "hhqqi"
"""Format of fcntl(2)'s ``struct flock``: type, whence, start, length, process (0 for these locks)."""

CLOSED = -1


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
            raise BadInputError(
                f"{self._path} was closed, or opened before this process was forked",
                "open it again in this process",
            )
        return fcntl.fcntl(self._descriptor, command, struct.pack(FORM, kind, os.SEEK_SET, byte, 1, 0))


_OPEN: weakref.WeakSet[ByteLocks] = weakref.WeakSet()


def _close_in_child() -> None:
    for locks in list(_OPEN):
        locks.close()


os.register_at_fork(after_in_child=_close_in_child)
