"""Time limits of jobs in tests, for the speed of this machine.

A job of a test is long enough for its start, and shorter than what it trains. On some machines, starts take
two to four times as long as on others.
"""

from __future__ import annotations

import time

USUAL_S = 0.019
"""Processor time in seconds of `_additions` on the machine for which the limits in tests were chosen."""

MOST = 4.0


def scaled(seconds: float) -> float:
    """Return so many seconds of the usual machine in seconds of this one; never fewer."""
    return round(seconds * SLOWDOWN, 3)


def limit(seconds: float) -> str:
    """Return a time limit, for `--time`, in whole seconds of this machine."""
    return f"{scaled(seconds):.0f}s"


def _additions() -> float:
    start = time.process_time()
    total = 0
    for number in range(1_000_000):
        total += number
    return time.process_time() - start


SLOWDOWN = min(MOST, max(1.0, min(_additions() for _ in range(3)) / USUAL_S))
