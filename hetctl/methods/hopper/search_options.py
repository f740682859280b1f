"""Options of a search for a schedule."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class SearchOptions:
    """Options of every scheduler; each uses those that it supports.

    Parameters
    ----------
    seconds : float
        Time limit of a search; a scheduler without a search ignores it.
    clock : callable
        Clock that returns seconds.
    """

    seed: int = 0
    seconds: float = 2.0
    clock: Callable[[], float] = time.monotonic
