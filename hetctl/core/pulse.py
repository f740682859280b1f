"""Live metrics of members in training: the last of each member, all of a job in one file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetctl.core.codec import decode, encode
from hetctl.core.layout import write_private

STALE_S = 30.0
"""A pulse is of no use after so long."""


@dataclass(frozen=True)
class Pulse:
    """One look at a member in training.

    Parameters
    ----------
    time : float
        Seconds since the epoch.
    epoch : int
        The one in training, counted from 1.
    position, samples : int
        Samples of the epoch that are done, and all of them.
    rate : float
        Samples/s of the whole group since the last look.
    loss : float or None
        Of the last batch; None if ``train_fn`` does not tell.
    busy : float or None
        Share of its GPU, or of its cores, that rank 0 used since the last look.
    """

    time: float
    epoch: int
    position: int
    samples: int
    rate: float
    loss: float | None = None
    busy: float | None = None


def write_pulses(path: Path, pulses: Mapping[str, Pulse]) -> None:
    """Replace the file of a job's members in training; for a reader it is always whole."""
    write_private(path, json.dumps(encode(pulses)) + "\n")


def read_pulses(path: Path, now: float | None = None) -> dict[str, Pulse]:
    """Return the pulses of a job by member: those that are fresh."""
    now = time.time() if now is None else now
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        pulses = {member: decode(Pulse, pulse) for member, pulse in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}
    return {
        member: pulse
        for member, pulse in pulses.items()
        if now - pulse.time < STALE_S and math.isfinite(pulse.rate)
    }
