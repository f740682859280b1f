"""Kills of the kernel's out-of-memory killer in the control group of this process."""

from __future__ import annotations

from pathlib import Path

MEMBERSHIP, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
COUNTERS = {"": "memory.events", "memory": "memory/memory.oom_control"}
"""File with the line ``oom_kill N``, by the controllers that `MEMBERSHIP` names: cgroups(7), version 2 and 1.

The group's own path comes before the last part.
"""


def oom_kills(membership: Path = MEMBERSHIP, root: Path = ROOT) -> int:
    """Return how many processes of this control group were killed for memory; 0 where that is not counted."""
    return max((_count(path) for path in _counters(membership, root)), default=0)


def _counters(membership: Path, root: Path) -> list[Path]:
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for _, controllers, group in (line.split(":", 2) for line in lines):
        if controllers in COUNTERS:
            counter = Path(COUNTERS[controllers])
            found.append(root / counter.parent / group.lstrip("/") / counter.name)
    return found


def _count(path: Path) -> int:
    try:
        words = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
        return next((int(value) for name, value in words if name == "oom_kill"), 0)
    except (OSError, ValueError):
        return 0
