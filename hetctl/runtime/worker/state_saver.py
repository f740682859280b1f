"""Checkpoints of members that have hopped on, written by a thread that outlives the visits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from hetctl.runtime.worker.checkpoint import Arrays, CheckpointFolder, OnSaved, TrainingState
from hetctl.runtime.worker.context import SavingFailure
from hetctl.storage.event_files import EventWriter

MOST_WAITING = 3
"""States that may wait: they occupy the node's memory until they are written."""
LOOK_S = 0.1
"""Seconds between two signs of life of a rank that waits until a state is written."""


@dataclass(frozen=True)
class UnsavedState:
    """A state on its way into a checkpoint.

    Parameters
    ----------
    arrays : Arrays
        Arrays that do not change until they are written, such as those of a mapped file.
    since : int or None
        Same as in `CheckpointFolder.save`.
    report : callable
        Function called in the saver's thread after the checkpoint is written.
    events : EventWriter
        Events of the member, for the failure of a rank that has no task by then.
    """

    folder: CheckpointFolder
    arrays: Arrays
    state: TrainingState
    since: int | None
    report: OnSaved
    events: EventWriter


class StateSaver:
    """Thread that writes one state after another.

    Parameters
    ----------
    on_failure : callable
        Function called in the thread after a state could not be written.

    Attributes
    ----------
    failure : SavingFailure or None
        The first failure.
    """

    def __init__(self, on_failure: Callable[[], None] = lambda: None) -> None:
        self.failure: SavingFailure | None = None
        self._on_failure = on_failure
        self._pool = ThreadPoolExecutor(1, "states")
        self._waiting: deque[Future[None]] = deque()

    @property
    def is_busy(self) -> bool:
        """True if a state is still to be written."""
        return any(not future.done() for future in self._waiting)

    def save(self, unsaved: UnsavedState, sign: Callable[[], None] = lambda: None) -> None:
        """Have a state written after the earlier ones; wait while too many are.

        Parameters
        ----------
        sign : callable
            Function called all the time while it waits.

        Raises
        ------
        Exception
            The error of an earlier state that could not be written.
        """
        self.check()
        self._waiting.append(self._pool.submit(self._write, unsaved))
        while len(self._waiting) > MOST_WAITING:
            if wait([self._waiting[0]], LOOK_S).done:
                self._waiting.popleft()
            sign()

    def check(self) -> None:
        """Raise the error of a state that could not be written; do not wait for one."""
        if self.failure is not None:
            raise self.failure.error

    def finish(self) -> None:
        """Wait until all states are written, or have failed."""
        wait(self._waiting)

    def close(self) -> None:
        """Wait as `finish` does, and end the thread."""
        self._pool.shutdown()

    def _write(self, unsaved: UnsavedState) -> None:
        if self.failure is not None:
            return
        try:
            began = time.perf_counter()
            manifest = unsaved.folder.save(unsaved.arrays, unsaved.state, unsaved.since)
            unsaved.report(manifest, time.perf_counter() - began)
        except Exception as error:
            self.failure = SavingFailure(error, unsaved.events)
            self._on_failure()
