"""Signals that ask a command to end, kept until it can end without leaving work half done."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption(KeyboardInterrupt):
    """Request of a signal to end the command."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interruptions:
    """Context manager that stores signals, and raises them only within `heeded`.

    A signal that was ignored before stays ignored, so that `nohup` works.
    """

    def __init__(self) -> None:
        self._kept: int | None = None
        self._raised: int | None = None
        """Signal that was raised and has not arrived: Python ignores exceptions in callbacks after a fork."""
        self._heeding = False
        self._before: dict[signal.Signals, signal.Handlers] = {}

    def __enter__(self) -> Interruptions:
        for number in HEEDED:
            before = signal.getsignal(number)
            # `nohup` ignores SIGHUP this way, and background jobs of some shells ignore SIGINT.
            if before is not signal.SIG_IGN:
                self._before[number] = before  # type: ignore[assignment]
                signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Raise a signal that has arrived, or arrives within the block, but only one.

        Raises
        ------
        Interruption
            As soon as there is a signal.
        """
        self._heeding = True
        try:
            self.check()
            yield
            self._raise_again()
        except Interruption:
            self._raised = None
            raise
        finally:
            self._heeding = False

    def check(self) -> None:
        """Raise a signal that has arrived; a loop within `heeded` calls it at times.

        Raises
        ------
        Interruption
            If there is one.
        """
        self._raise_again()
        if self._kept is not None:
            # Cleared first: the signal is raised once, and a second one counts anew.
            number, self._kept = self._kept, None
            self._heeding = False
            raise Interruption(number)

    def _raise_again(self) -> None:
        if self._raised is not None:
            number, self._raised = self._raised, None
            raise Interruption(number)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._heeding:
            self._heeding, self._raised = False, number
            raise Interruption(number)
        # Raised only where nothing is left half done, such as a submission without its ids on the disk.
        self._kept = number
