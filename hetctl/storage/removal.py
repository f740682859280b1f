"""Removal of a run's files: a kill at any moment leaves a whole run, or nothing that a reader finds."""

from __future__ import annotations

import shutil

from hetctl.storage.atomic_io import file_mode, make_private_folder
from hetctl.storage.paths import Home


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
