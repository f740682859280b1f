"""Folders in the memory of this node, for processes that share; the last user removes its folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hetctl.model.errors import TransientInputError
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.processes import BOOT_ID

MEMORY = Path("/dev/shm")
LEAST_FREE = 2**29
"""Bytes of free memory below which, as in many containers, the node's disk is used instead."""
USERS = ".users"
KEY_DIGITS, BOOT_DIGITS = 12, 8


def _places(name: str) -> tuple[Path, Path]:
    """Return this user's folders of a name: in the node's memory, and on its disk."""
    own = f"hetctl-{os.getuid()}"
    # A folder that an earlier boot left on the disk may be incomplete: it has another name.
    boot = BOOT_ID.read_text(encoding="ascii")[:BOOT_DIGITS]
    return MEMORY / own / name, Path(tempfile.gettempdir()) / own / f"{boot}-{name}"


def _is_private(folder: Path) -> bool:
    """Return true if a folder exists, is this user's, and is closed to all others."""
    # /dev/shm and /tmp are open to all users: one may have made a folder or a link of this name before.
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_own and not status.st_mode & 0o077


def run_key(run: str, checkpoints: str) -> str:
    """Return a name for a run that differs from those of all other runs of this user.

    Runs of two projects may have one name, and their trainers may meet on a node.

    Parameters
    ----------
    checkpoints : str
        Folder of the project's checkpoints.
    """
    return f"{run}-{hashlib.sha256(checkpoints.encode()).hexdigest()[:KEY_DIGITS]}"


def folder_of(run_key: str, node: str) -> str:
    """Return the name of the folder that the trainers of a run share on a node."""
    return f"{run_key}-{node}"


def state_folder(run_key: str, node: str) -> str:
    """Return the name of the folder in which a node stores the states of members that hop."""
    return f"{run_key}-{node}-states"


@contextmanager
def node_folder(name: str) -> Iterator[Path]:
    """Use a folder together with other processes that use the same name.

    Folders left by processes that were killed are removed first.

    Raises
    ------
    TransientInputError
        If the user's folder belongs to another user, or others can access it.
    """
    in_memory, on_disk = _places(name)
    # Before a place is chosen: leftovers may occupy the memory.
    for place in (in_memory, on_disk):
        if _is_private(place.parent):
            _sweep(place)
    # Members that start when memory has become short must still meet those that are there.
    folder = in_memory if in_memory.exists() or _has_room(MEMORY) else on_disk
    make_private_folder(folder.parent)
    if not _is_private(folder.parent):
        raise TransientInputError(
            f"{folder.parent} is accessible to other users, and trainers share data in it", "remove it"
        )
    users = _enter(folder)
    try:
        yield folder
    finally:
        _release(folder, users)


def _has_room(folder: Path) -> bool:
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize >= LEAST_FREE


def _enter(folder: Path) -> int:
    """Acquire the shared lock of a folder's users; retry if the folder was removed before it was locked."""
    while True:
        # Another process may take the folder for a killed process's and remove it, even amid its creation.
        with suppress(FileNotFoundError):
            make_private_folder(folder)
            users = os.open(folder / USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # The kernel drops the lock with the process: a killed user does not keep the folder in use.
            fcntl.flock(users, fcntl.LOCK_SH)
            if _is_still(folder / USERS, users):
                return users
            os.close(users)


def _release(folder: Path, users: int) -> None:
    """Remove a folder unless others use it."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and lock another process may have removed the folder, and a third one made it anew.
        if _is_still(folder / USERS, users):
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(users)


def _sweep(but: Path) -> None:
    for folder in but.parent.iterdir():
        if folder != but and folder.is_dir():
            with suppress(OSError):
                users = os.open(folder / USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                _release(folder, users)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
