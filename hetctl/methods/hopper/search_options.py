"""What a person may set of a search for a schedule."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class SearchOptions:
    """What every scheduler is told; it reads what it knows.

    Parameters
    ----------
    seconds : float
        How long a scheduler that searches may do so; one that does not takes what it needs.
    clock : callable
        Counts seconds.
    """

    seed: int = 0
    seconds: float = 2.0
    clock: Callable[[], float] = time.monotonic
