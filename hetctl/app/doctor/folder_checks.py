"""Checks of the project folder: its file system and what that supports."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hetctl.model.check_result import CheckResult, CheckStatus
from hetctl.model.site import Site

SHARED = (
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.",
    "glusterfs",
    "gpfs",
    "lustre",
    "nfs",
    "panfs",
    "wekafs",
    "9p",
)
"""Prefixes of the names of file systems that several machines share."""
CHECK = "shared folder"
ABILITIES = "file system"


def filesystem_of(path: Path, mounts: str) -> str:
    """Return the type of the file system that holds a path, by the text of ``/proc/self/mountinfo``."""
    best = (-1, "unknown")
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 5 or not kinds:
            continue
        point = Path(fields[4].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= best[0]:
            best = (len(point.parts), kinds[0])
    return best[1]


def place_finding(site: Site, path: Path, kind: str) -> CheckResult:
    """Return a finding on access from compute nodes, by the file system; only a job can verify it."""
    found = f"{path} is on {kind}"
    if site.batch_system == "local" or kind.startswith(SHARED):
        return CheckResult(CHECK, CheckStatus.OK, found)
    fix = "compute nodes must see it: set HETCTL_HOME to a shared folder, or let --job show that they do"
    return CheckResult(CHECK, CheckStatus.WARNING, f"{found}, which looks like this machine's own", fix)


def ability_finding(path: Path) -> CheckResult:
    """Test writing, renaming, linking and locking in a temporary folder beside the future one."""
    parent = next(each for each in (path, *path.parents) if each.is_dir())
    try:
        folder = Path(tempfile.mkdtemp(prefix=".hetctl-doctor-", dir=parent))
    except OSError as error:
        fix = "make it writable, or set HETCTL_HOME to another folder"
        return CheckResult(ABILITIES, CheckStatus.FAILED, f"{parent}: {error.strerror}", fix)
    try:
        failures = list(_failures(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if failures:
        fix = "set HETCTL_HOME to a folder on another file system"
        return CheckResult(ABILITIES, CheckStatus.FAILED, f"{parent} cannot {'; '.join(failures)}", fix)
    return CheckResult(ABILITIES, CheckStatus.OK, f"{parent} can write, rename, link and lock")


def _failures(folder: Path) -> Iterator[str]:
    first, second, third = folder / "first", folder / "second", folder / "third"
    deeds: dict[str, Callable[[], object]] = {
        "write": lambda: first.write_text("hetctl\n"),
        "rename": lambda: first.replace(second),
        "link": lambda: os.link(second, third),
        "lock": lambda: _lock(third),
    }
    for name, deed in deeds.items():
        try:
            deed()
        except OSError as error:
            yield f"{name} ({error.strerror})"
            return


def _lock(path: Path) -> None:
    with path.open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
