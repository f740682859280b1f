"""Memory that is allocated ahead for the next copy of a state, which would take longer than its bytes."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from hetctl.runtime.data.sharing.node_folder import LEAST_FREE

MOST_BYTES = 2**28
"""Largest size of a spare file: a larger state gets the rest of its memory while it is written."""


class SpareFile:
    """One file at most, under a hidden name in a folder of the node's memory.

    Parameters
    ----------
    most_bytes : int
        Largest size of the file.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.path = folder / ".spare"
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._closed = False

    def take(self, path: Path) -> None:
        """Give the file, if there is one, another name; its content is arbitrary."""
        with suppress(FileNotFoundError):
            self.path.replace(path)

    def renew(self, size_bytes: int) -> None:
        """Provide a file for the next copy, which is expected to be as large as the last one."""
        with self._lock, suppress(OSError):
            if self._closed or self.path.exists():
                return
            size_bytes = min(size_bytes, self._most_bytes)
            status = os.statvfs(self.path.parent)
            if 0 < size_bytes <= status.f_bavail * status.f_frsize - LEAST_FREE:
                self._allocate(size_bytes)

    def close(self) -> None:
        """Provide no more files; the present one is deleted."""
        with self._lock:
            self._closed = True
            self.path.unlink(missing_ok=True)

    def _allocate(self, size_bytes: int) -> None:
        making = self.path.with_name(".spare-in-making")
        descriptor = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            making.replace(self.path)
        finally:
            os.close(descriptor)
            making.unlink(missing_ok=True)
