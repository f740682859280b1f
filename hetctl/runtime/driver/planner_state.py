"""Memory of a run's planner, kept from one job to the next."""

from __future__ import annotations

import json
from typing import Any

from hetctl.storage.atomic_io import write_json
from hetctl.storage.paths import RunFolder


def remember(folder: RunFolder, memory: Any) -> None:
    """Save the planner's memory when a round is opened, if it has changed."""
    if memory != last_memory(folder):
        write_json(folder.memory, memory)


def last_memory(folder: RunFolder) -> Any:
    """Return the planner's memory at the start of the run's newest round; None if there is none."""
    if not folder.memory.exists():
        return None
    return json.loads(folder.memory.read_text(encoding="utf-8"))
