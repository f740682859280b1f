"""Reasons for groups to leave: the driver's word, and SIGTERM to this rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetctl.runtime.worker.messages import StopMessage
from hetctl.scheduling.rounds import SIGNAL


class Stops:
    """Reasons for groups to leave with a checkpoint, by the keys of the groups.

    Parameters
    ----------
    report : callable
        Tells the driver that this rank was signalled, so that the other ranks of its group hear of it.
    """

    def __init__(self, report: Callable[[], None]) -> None:
        self._reasons: dict[str, str] = {}
        self._report = report
        self._to_report = False

    def add(self, stop: StopMessage) -> None:
        """Note the driver's word; the first reason stands."""
        self._reasons.setdefault(stop.key, stop.reason)

    def reason(self, key: str) -> str | None:
        """Return why a group is to leave, or None; called by the group at work, between two steps."""
        if self._to_report:
            # A signal handler could not: it may have interrupted the sending of something else.
            self._to_report = False
            self._report()
        return self._reasons.get(key)

    @contextmanager
    def heeding_sigterm(self, key: str) -> Iterator[None]:
        """Let SIGTERM ask the group at work to leave; a second one ends the rank, as one does that is idle.

        It also ends processes that the user's functions have forked, which inherit the handler.
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
