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


def write_heartbeats(path: Path, pulses: Mapping[str, Heartbeat]) -> None:
    """Replace the file of a job's heartbeats atomically."""
    write_private(path, json.dumps(encode(pulses)) + "\n")


def read_heartbeats(path: Path, now: float | None = None) -> dict[str, Heartbeat]:
    """Return the recent heartbeats of a job by member."""
    now = time.time() if now is None else now
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        pulses = {member: decode(Heartbeat, pulse) for member, pulse in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}
    return {
        member: pulse
        for member, pulse in pulses.items()
        if now - pulse.time < STALE_S and math.isfinite(pulse.rate)
    }
