"""GPUs or slots of this machine, each held by one local job at a time.

A slot is held by a lock on a file. The kernel releases the lock with the last process that inherited it, so
that no cleanup is needed after a job, even after a crash.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

FOLDER_VARIABLE = "HETCTL_SLOT_LOCKS"


def lock_folder() -> Path:
    """Return the folder of the locks, common to all of a user's projects on this machine."""
    return Path(os.environ.get(FOLDER_VARIABLE) or f"/tmp/hetctl-{os.getuid()}")


class Slots:
    """Slots of a machine that one job holds.

    Parameters
    ----------
    folder : Path
        Folder of the locks, on a local file system of this machine.
    kind : str
        Kind of the slots; different kinds are independent.
    count : int
        Number of slots of the machine.
    """

    def __init__(self, folder: Path, kind: str, count: int) -> None:
        self._turn = folder / f"{kind}-turn"
        self._locks = {number: folder / f"{kind}-{number}" for number in range(count)}
        self._turn_held: int | None = None
        self._held: dict[int, int] = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the held slots, in order."""
        return tuple(sorted(self._held))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that a process must inherit to hold the slots, too."""
        return tuple(self._held.values())

    def take(self, wanted: int) -> bool:
        """Take free slots until `wanted` are held; return False if the call must be repeated.

        Only one waiting job at a time takes slots, so that a large job does not starve.
        """
        if self._turn_held is None:
            self._turn_held = _lock(self._turn)
        if self._turn_held is None:
            return False
        for number, path in self._locks.items():
            if number not in self._held and len(self._held) < wanted:
                descriptor = _lock(path)
                if descriptor is not None:
                    self._held[number] = descriptor
        if len(self._held) < wanted:
            return False
        os.close(self._turn_held)
        return True


def _lock(path: Path) -> int | None:
    """Return the descriptor of the file with the lock; None if another process holds it."""
    # By default the folder lies in /tmp, where another user could place a link (O_NOFOLLOW).
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # flock(2) rather than fcntl(2): it belongs to the open file, and so to all processes that inherit it.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
