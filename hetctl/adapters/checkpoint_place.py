"""Folder of a script's checkpoints, in a run and outside of one."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_VARIABLE = "HETCTL_CHECKPOINT_DIR"
OUTSIDE = "checkpoints"
"""Folder, below the current one, that a script uses outside of a run."""


def replace_durably(new: Path, old: Path) -> None:
    """Rename a file over another; after a crash of the node, one of the two is whole."""
    flush_to_disk(new)
    new.replace(old)
    flush_to_disk(old.parent)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoint_folder() -> Path:
    """Return the folder of a member's checkpoints; create it if it is missing."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, OUTSIDE))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
