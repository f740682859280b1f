"""Handwritten digits, for workers of unequal speed, each of which sleeps as a table says."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from handwriting import digits

LAUNCH_S = 0.02
PER_SAMPLE_S = (0.001, 0.002, 0.004, 0.008)
"""Seconds of a step without samples, and of each sample by worker."""
TRAINING = 1437
"""Samples; the other 360 are for validation."""
UNITS = 32
"""Of the only hidden layer of the networks."""


def input_fn(_data: object) -> Any:
    """Return training and validation samples."""
    x, y = digits()
    order = np.random.default_rng(0).permutation(len(x))
    one, other = order[:TRAINING], order[TRAINING:]
    return (x[one], y[one]), (x[other], y[other])


def sleep_as(worker: int, samples: int, began: float, pace: float = 1.0) -> None:
    """Sleep until a worker has taken its time for so many samples, times `pace`."""
    due = began + pace * (LAUNCH_S + PER_SAMPLE_S[worker] * samples)
    time.sleep(max(0.0, due - time.monotonic()))
