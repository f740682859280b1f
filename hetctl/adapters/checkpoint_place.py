"""Place of a script's checkpoints, in a run and outside of one."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_VARIABLE = "HETCTL_CHECKPOINT_DIR"
OUTSIDE = "checkpoints"
"""Folder in the current one that a script uses outside of a run."""


def checkpoint_folder() -> Path:
    """Return the folder of a member's checkpoints, which exists then."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, OUTSIDE))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
