"""Monitoring of profiling jobs until they end or a signal arrives."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn

from hetctl.app.profile.folder import FAILED, MEASURED, SKIPPED, sources_in
from hetctl.app.profile.jobs import (
    ProfileJob,
    under_way,
)
from hetctl.cluster.batch.base import BatchSystem
from hetctl.model.errors import InterruptedCommandError
from hetctl.storage.profile_request import ProfileTarget

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


FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Least and largest seconds between two queries of the batch system; each pause is twice the last one."""


class ProfileMonitor:
    """Interface for progress and for the decision after Ctrl-C; this default is silent, and cancels."""

    can_ask = False
    """True if `cancels` asks a person, who may press Ctrl-C once more."""

    def adopted(self, ids: Sequence[str], points: int) -> None:
        """Report how many of the points jobs of an earlier command measure already."""

    def progressed(self, done: int, total: int) -> None:
        """Report how many points are measured or have failed."""

    def cancels(self, ids: Sequence[str]) -> bool:  # noqa: ARG002
        """Return true if the jobs are to be cancelled, false if they continue to measure."""
        return True


def follow(
    batch: BatchSystem,
    jobs: Sequence[ProfileJob],
    points: Iterable[ProfileTarget],
    on_progress: Callable[[int, int], None],
    check: Callable[[], None],
    poll_s: float,
    interval_s: float | None = None,
) -> None:
    """Poll the jobs' files until all jobs are over; query the batch system at growing intervals.

    Parameters
    ----------
    points : iterable of ProfileTarget
        Points whose progress is reported.
    check : callable
        Function that raises a signal that has arrived.
    poll_s : float
        Time in seconds between two reads of the files.
    interval_s : float or None
        Interval between queries in seconds, where the site sets it.
    """
    sources = {point.source for point in points}
    waiting = list(jobs)
    for ask in moments_to_ask(interval_s):
        waiting = under_way(batch, waiting) if ask else [job for job in waiting if not job.has_returned]
        ended = set().union(*(sources_in(job.folder, *MEASURED, SKIPPED, FAILED) for job in jobs))
        on_progress(len(ended & sources), len(sources))
        if not waiting:
            return
        check()
        time.sleep(poll_s)


def moments_to_ask(
    interval_s: float | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[bool]:
    """Yield true at each poll of the files at which the batch system is to be queried as well.

    Parameters
    ----------
    interval_s : float or None
        Same as in `follow`.
    clock : callable
        Clock that returns seconds.
    """
    pause, asked_at = interval_s or FIRST_PAUSE_S, clock()
    while True:
        due = clock() >= asked_at + pause
        if due:
            pause, asked_at = interval_s or min(2 * pause, LONGEST_PAUSE_S), clock()
        yield due


def raise_interrupted(interruption: Interruption, what: str, hint: str) -> NoReturn:
    """End the command because of a signal.

    Raises
    ------
    InterruptedCommandError
        In every case.
    """
    name = signal.Signals(interruption.number).name
    raise InterruptedCommandError(interruption.number, f"{name}: {what}", hint) from None


def naming(ids: Sequence[str], one: str, several: str) -> str:
    """Return the beginning of a sentence about jobs: ``job 4711 is cancelled``."""
    return f"job {ids[0]} {one}" if len(ids) == 1 else f"jobs {', '.join(ids)} {several}"
