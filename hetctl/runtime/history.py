"""What the folders of a run tell the driver of its next round."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hetctl.core.events import DRIVER, read_events
from hetctl.core.layout import RoundFolder, RunFolder


def began_at(folder: RunFolder) -> float:
    """Return when the first job of the run started, in seconds since the epoch; now if this is it."""
    drivers = (read_events(opened.events_of(DRIVER)) for opened in folder.rounds())
    first = (min((event.time for event in events), default=None) for events in drivers)
    return next((began for began in first if began is not None), time.time())


def last_memory(folder: RunFolder) -> Any:
    """Return what the planner remembered when the newest round of the run was opened."""
    planned = [opened for opened in folder.rounds() if opened.file.exists()]
    return json.loads(planned[-1].file.read_text(encoding="utf-8")).get("memory") if planned else None


def first_folder(folder: RunFolder, index: int) -> RoundFolder:
    """Return the folder that a job starts with: a new one, if rounds began while the job was queued.

    Parameters
    ----------
    index : int
        Of the folder that was made when the job was submitted, and holds its script.
    """
    made = folder.round(index)
    latest = folder.rounds()
    if not latest or latest[-1].index <= index:
        return made.create()
    first = folder.round(folder.next_index())
    make_folder(first, made)
    return first


def next_folder(folder: RunFolder, first: RoundFolder) -> RoundFolder:
    """Return the folder of a job's next round; its first one was made before it started."""
    return folder.round(folder.next_index()) if first.file.exists() else first


def make_folder(folder: RoundFolder, first: RoundFolder) -> None:
    """Make the folder of a round, with the script of its job."""
    folder.create()
    if folder != first:
        folder.script.symlink_to(Path("..") / first.path.name / folder.script.name)
