"""Files and folders that only their owner can read, written completely and durably or not at all.

Below a folder that is shared with a group, as `share_with_group` makes it, they are the group's, too.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from hetctl.model.errors import DamagedFileError
from hetctl.model.serialization import parse

T = TypeVar("T")

NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EACCES})
"""Errors of folders that cannot be opened, or that fsync(2) does not support."""


SHARED = stat.S_ISGID | 0o070
"""Mode bits of a folder whose new files and folders are the group's: it has the set-group-ID bit."""


def is_shared(folder: Path) -> bool:
    """Return true if a folder is shared with its group."""
    return folder.stat().st_mode & SHARED == SHARED


def file_mode(folder: Path) -> int:
    """Return the mode of new files in a folder."""
    return 0o660 if is_shared(folder) else 0o600


def new_folder(path: Path) -> Path:
    """Create a folder in an existing one, with its mode, whatever the umask; FileExistsError if it exists."""
    shared = is_shared(path.parent)
    # mkdir(2) inherits the set-group-ID bit and the group. chmod(2) keeps the entries of an ACL, but clears
    # that bit if the group is not the user's, who got here by such an entry; the umask does not count there.
    path.mkdir(mode=0o770 if shared else 0o700)
    if not (shared and is_shared(path)):
        path.chmod(0o2770 if shared else 0o700)
    return path


def share_with_group(folder: Path) -> None:
    """Share a folder with the group of the folder that it is in; what is there before becomes shared, too.

    Raises
    ------
    PermissionError
        If it is another user's.
    """
    group = folder.parent.stat().st_gid
    for path in [folder, *folder.rglob("*")]:
        found = path.lstat()
        if not stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid():
            os.chown(path, -1, group)
            # Another process may remove a file meanwhile; chown(2) clears the set-group-ID bit.
            path.chmod(0o2770 if stat.S_ISDIR(found.st_mode) else 0o660)
    if not is_shared(folder):
        raise PermissionError(errno.EPERM, "is another user's", str(folder))


def make_private_folder(path: Path) -> Path:
    """Create a folder and its parents, readable by the owner alone, whatever the umask."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with suppress(FileExistsError):
            new_folder(folder)
        sync_folder(folder.parent)
    return missing[0] if missing else path


def sync_folder(path: Path) -> None:
    """Wait until the names of new and renamed files in a folder are on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


@contextmanager
def private_file(path: Path, *, durable: bool = True, secret: bool = False) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` atomically at the end, readable by the owner alone.

    A reader never sees a partial file. A crash after the end does not bring the old file back. After an
    error the file is the old one or the complete new one.

    Parameters
    ----------
    durable : bool
        False for a file that a crash may set back to its earlier state.
    secret : bool
        True for a file that no group may read.
    """
    with unfinished_file(path.with_name(f".{path.name}.{os.getpid()}.tmp"), secret=secret) as file:
        yield file
        sync_and_rename(file, path)
    if durable:
        sync_folder(path.parent)


@contextmanager
def unfinished_file(path: Path, *, secret: bool = False) -> Iterator[BinaryIO]:
    """Open a new private file for writing and reading; an error removes it."""
    try:
        with open(path, "w+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            os.fchmod(file.fileno(), 0o600 if secret else file_mode(path.parent))
            yield file
    except BaseException:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """Yield a hidden path beside `path`, for a file that may take its name; one that has not is removed."""
    own = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield own
    finally:
        own.unlink(missing_ok=True)


def sync_and_rename(file: BinaryIO, path: Path) -> None:
    """Name an open file once its data are on the disk; `sync_folder` makes the name durable."""
    file.flush()
    # rename(2) is atomic for readers, but does not order data: after a crash the file could be empty.
    os.fsync(file.fileno())
    Path(file.name).replace(path)


def hard_link(file: Path, path: Path) -> bool:
    """Give a file a second name; return False if that name is taken."""
    try:
        os.link(file, path)
    except FileExistsError:
        # NFS repeats a request whose answer was lost, and then reports that the link exists.
        return file.stat().st_nlink == 2
    return True


def write_private(path: Path, text: str, *, durable: bool = True, secret: bool = False) -> None:
    """Replace a file as `private_file` does."""
    with private_file(path, durable=durable, secret=secret) as file:
        file.write(text.encode())


def json_text(value: Any, *, allow_nan: bool = False) -> str:
    """Return the text of a JSON file: a line for each value."""
    # Python would write NaN, which other programs refuse. `indent` would take ten times as long.
    return json.dumps(value, separators=(",\n", ": "), allow_nan=allow_nan) + "\n"


def write_json(path: Path, value: Any, *, secret: bool = False) -> None:
    """Write a JSON file as `write_private` does."""
    write_private(path, json_text(value), secret=secret)


def read_json(path: Path, kind: type[T], repair: str) -> T:
    """Read a file of `write_json` as a value of type `kind`.

    Parameters
    ----------
    repair : str
        Hint of the error: the user's next step.

    Raises
    ------
    DamagedFileError
        If the file does not have such a value.
    """
    try:
        return parse(kind, path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedFileError(f"{path} is damaged: {error!s:.200}", repair) from None
