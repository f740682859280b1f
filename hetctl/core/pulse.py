"""What a member in training does just now; only its last word is kept."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

from hetctl.core.codec import decode

STALE_S = 30.0
"""After so long without a word nobody knows what a member does."""


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


def read_pulse(path: Path, now: float | None = None) -> Pulse | None:
    """Return a member's last word; None if there is none that is fresh and whole."""
    try:
        pulse = decode(Pulse, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
    fresh = (time.time() if now is None else now) - pulse.time < STALE_S
    return pulse if fresh and math.isfinite(pulse.rate) else None
