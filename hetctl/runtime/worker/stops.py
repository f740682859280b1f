"""Reasons for groups to stop: a message of the driver, and SIGTERM to this rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetctl.runtime.worker.messages import StopMessage
from hetctl.scheduling.rounds import SIGNAL


class Stops:
    """Reasons for groups to stop with a checkpoint, by the keys of the groups.

    Parameters
    ----------
    report : callable
        Function that reports to the driver that this rank was signalled, so that it stops the other ranks.
    """

    def __init__(self, report: Callable[[], None]) -> None:
        self._reasons: dict[str, str] = {}
        self._report = report
        self._to_report = False

    def add(self, stop: StopMessage) -> None:
        """Record the driver's message; the first reason stands."""
        self._reasons.setdefault(stop.key, stop.reason)

    def reason(self, key: str) -> str | None:
        """Return why a group has to stop, or None; the group at work calls it between two steps."""
        if self._to_report:
            # A signal handler cannot send it: it may have interrupted the sending of another message.
            self._to_report = False
            self._report()
        return self._reasons.get(key)

    @contextmanager
    def heeding_sigterm(self, key: str) -> Iterator[None]:
        """Make SIGTERM stop the group at work; a second one ends the rank, as the first does if it is idle.

        SIGTERM also ends processes forked by the user's functions, which inherit the handler.
        """
        rank, asked = os.getpid(), False

        def heed(number: int, _frame: Any) -> None:
            nonlocal asked
            if asked or os.getpid() != rank:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            asked = self._to_report = True
            self._reasons.setdefault(key, SIGNAL)

        signal.signal(signal.SIGTERM, heed)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._to_report = False
