"""Scratch copy of a project's folder, in which a script is measured without replacing its results."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from hetctl.storage.atomic_io import new_folder

MOST_BYTES, MOST_FILES = 2**28, 2000
"""Largest entry of the folder, by bytes and by files in it, that is copied."""


def linked_in(project: Path) -> list[str]:
    """Return the files and folders in a project's folder that a copy only links, without hidden ones."""
    return [path.name for path in _entries(project) if path.name[0] != "." and not _is_copied(path)]


def copy_project(project: Path, target: Path, heartbeat: Callable[[], None]) -> None:
    """Make a copy of a project's folder; large and hidden folders, and all links, are linked.

    Parameters
    ----------
    heartbeat : callable
        Function called after each file.

    Raises
    ------
    OSError
        If a file cannot be copied.
    """
    new_folder(target)
    for path in _entries(project):
        copy = _copy if _is_copied(path) and path not in target.parents else _link
        copy(path, target / path.name, heartbeat)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.absolute().iterdir())


def _is_copied(path: Path) -> bool:
    if path.is_symlink() or (path.is_dir() and path.name.startswith(".")):
        return False
    size = 0
    for number, file in enumerate(path.rglob("*") if path.is_dir() else (path,)):
        size += 0 if file.is_dir() else file.lstat().st_size
        if number >= MOST_FILES or size > MOST_BYTES:
            return False
    return True


def _copy(source: Path, target: Path, heartbeat: Callable[[], None]) -> None:
    if source.is_symlink() or not (source.is_dir() or source.is_file()):
        _link(source, target, heartbeat)
    elif source.is_dir():
        new_folder(target)
        for path in _entries(source):
            _copy(path, target / path.name, heartbeat)
    else:
        shutil.copy2(source, target)
        heartbeat()


def _link(source: Path, target: Path, _heartbeat: Callable[[], None]) -> None:
    target.symlink_to(source)
