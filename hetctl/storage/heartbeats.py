"""Heartbeats of members in training: the newest of each member, one file per job."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetctl.model.serialization import decode, encode
from hetctl.model.training_progress import Heartbeat
from hetctl.storage.atomic_io import write_private

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
