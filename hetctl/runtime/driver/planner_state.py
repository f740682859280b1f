"""Memory of a run's planner, from one job to the next."""

from __future__ import annotations

import json
from typing import Any

from hetctl.storage.atomic_io import write_json
from hetctl.storage.paths import RunFolder


def remember(folder: RunFolder, memory: Any) -> None:
    """Keep what the planner remembers when a round is opened, if it is news."""
    if memory != last_memory(folder):
        write_json(folder.memory, memory)


def last_memory(folder: RunFolder) -> Any:
    """Return what the planner remembered when the newest round of the run was opened."""
    if not folder.memory.exists():
        return None
    return json.loads(folder.memory.read_text(encoding="utf-8"))
