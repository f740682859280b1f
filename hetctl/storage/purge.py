"""Deletion of a run's files: by its user, and by a site when nobody has used them for some days."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from hetctl.model.site import Purge
from hetctl.storage.atomic_io import file_mode, make_private_folder
from hetctl.storage.paths import Home, RunFolder, member_folder

DAY_S = 86400.0
WARNED_SHARE = 0.5
"""Share of the days that is left when a warning begins."""


def kept_files(folder: RunFolder, checkpoints: Path) -> Iterator[Path]:
    """Yield the files without which a run cannot go on, and commands do not open for weeks.

    Parameters
    ----------
    checkpoints : Path
        Folder of all checkpoints.
    """
    # Not those at the top of the folder: a lease's time is a sign of life.
    for place in (folder.events, member_folder(checkpoints, folder.name, "")):
        yield from files_below(place)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and in those below it; links are not followed."""
    # Not `rglob`, which follows no links either, but needs twice the time.
    for path, _, names in os.walk(folder):
        yield from (Path(path, name) for name in names)


def last_uses(paths: Iterable[Path]) -> Iterator[float]:
    """Yield when each file was read or written last, in seconds since the epoch."""
    for path in paths:
        try:
            facts = path.stat()
        except FileNotFoundError:
            continue
        yield max(facts.st_atime, facts.st_mtime)


def purge_warning(purge: Purge, created_at: float, uses: Iterable[float], now: float) -> str:
    """Return a warning with the date from which a run's files are deleted; empty long before it.

    Parameters
    ----------
    created_at : float
        When the run began. Files of a young run are not asked for: that is a request to a server for each.
    uses : iterable of float
        Last use of each file; all times are in seconds since the epoch.
    """
    kept_s = purge.days * DAY_S
    quiet_s = kept_s * (1 - WARNED_SHARE)
    if now - created_at < quiet_s or now - (oldest := min(uses, default=now)) < quiet_s:
        return ""
    end = oldest + kept_s
    date = time.strftime("%Y-%m-%d", time.localtime(end))
    return (
        f"the site deletes files that nobody has used for {purge.days} days, of this run from {date} on:"
        " let it go on, `hetctl export` it, or copy the project"
    )


def renew(paths: Iterable[Path], now: float) -> None:
    """Let files count as used now; when they were written stays."""
    for path in paths:
        try:
            os.utime(path, (now, path.stat().st_mtime))
        except (FileNotFoundError, PermissionError):  # a file of another user in a shared project
            continue


def remove_files(home: Home, run: str) -> None:
    """Remove the folder and the checkpoints of a run, and what earlier removals have left."""
    if home.removing.exists():
        shutil.rmtree(home.removing)
    make_private_folder(home.removing)
    # The folder first: a run without its checkpoints would be half a run.
    for path, name in ((home.run(run).path, run), (home.checkpoints / run, f"{run}.checkpoints")):
        if path.exists():
            path.rename(home.removing / name)
    shutil.rmtree(home.removing)


def use_up_name(home: Home, run: str) -> None:
    """Note that no later run may have this name: the batch system would take their jobs for each other."""
    make_private_folder(home.removed)
    (home.removed / run).touch(mode=file_mode(home.removed))
