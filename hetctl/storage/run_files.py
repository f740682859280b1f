"""Files of a run that are replaced as a whole: ``run.json``, ``planner.json``, and heartbeats of members."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetctl.model.run import RunSpec
from hetctl.model.serialization import decode, encode
from hetctl.model.training_progress import Heartbeat
from hetctl.storage.atomic_io import write_json, write_private
from hetctl.storage.paths import RunFolder, member_folder


def write_spec(folder: RunFolder, spec: RunSpec) -> None:
    """Write ``run.json``."""
    write_json(folder.spec, encode(spec))


def read_spec(folder: RunFolder) -> RunSpec:
    """Read ``run.json``."""
    return decode(RunSpec, json.loads(folder.spec.read_text(encoding="utf-8")))


def checkpoint_folder(spec: RunSpec, member: str) -> Path:
    """Return the folder of a member's checkpoints."""
    return member_folder(Path(spec.checkpoints), spec.run, member)


def write_planner_state(folder: RunFolder, state: Any) -> None:
    """Write ``planner.json`` if the planner's state differs from the one in the file."""
    if state != read_planner_state(folder):
        write_json(folder.planner_state, state)


def read_planner_state(folder: RunFolder) -> Any:
    """Return the planner's state at the start of the run's newest round; None if there is none."""
    if not folder.planner_state.exists():
        return None
    return json.loads(folder.planner_state.read_text(encoding="utf-8"))


STALE_S = 30.0
"""Age in seconds above which a heartbeat is ignored."""


def write_heartbeats(path: Path, heartbeats: Mapping[str, Heartbeat]) -> None:
    """Replace the file of a job's heartbeats atomically."""
    write_private(path, json.dumps(encode(heartbeats)) + "\n")


def read_heartbeats(path: Path, now: float | None = None) -> dict[str, Heartbeat]:
    """Return the recent heartbeats of a job by member."""
    now = time.time() if now is None else now
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        heartbeats = {member: decode(Heartbeat, value) for member, value in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}
    return {
        member: heartbeat
        for member, heartbeat in heartbeats.items()
        if now - heartbeat.time < STALE_S and math.isfinite(heartbeat.rate)
    }
