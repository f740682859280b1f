"""A run as its events have it, kept up to date: each event is read and folded once."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hetctl.core.ensemble import Ensemble
from hetctl.core.event_log import EventLog
from hetctl.core.events import Event
from hetctl.core.layout import RunFolder
from hetctl.core.profile import Progress
from hetctl.core.progress import ProgressFold
from hetctl.core.steps import StepFold, StepKey, StepReport, Steps
from hetctl.core.usage import Usage, UsageFold


@contextmanager
def _without_collections() -> Iterator[None]:
    """Spare the search for garbage in what is only growing: a third of the time to read a large run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class News:
    """News of one look.

    Parameters
    ----------
    events : sequence of Event
        Each file's in their order.
    members : set of str
        Whose progress may have changed; at the first look all.
    steps : mapping of (int, str) to tuple of Step
        Steps that have started or ended, by round and member.
    """

    events: Sequence[Event]
    members: set[str]
    steps: Mapping[StepKey, Steps]


class RunState:
    """The progress of a run's members, what their trainers have reported, and what the run has used.

    Attributes
    ----------
    reports : mapping of (int, str) to StepReport
        By round and member.
    """

    def __init__(self, folder: RunFolder, ensemble: Ensemble, retries: int) -> None:
        self._log = EventLog(folder)
        self._progress = ProgressFold(ensemble, retries)
        self._steps, self._usage = StepFold(), UsageFold()
        self._untold = set(self._progress.progress)
        self.reports: dict[StepKey, StepReport] = defaultdict(StepReport)

    @property
    def began_at(self) -> float | None:
        """When the first job started, in seconds since the epoch; None if none has."""
        return self._usage.began_at

    @property
    def next_round(self) -> int:
        """Index that no round has so far."""
        return self._usage.next_round

    @property
    def progress(self) -> Mapping[str, Progress]:
        """By member, in the ensemble's order."""
        return self._progress.progress

    def used(self, now: float) -> Usage:
        """Return what the run has used; `now` is in seconds since the epoch."""
        return self._usage.used(now)

    def look(self) -> News:
        """Read and fold what has been appended to the run's files since the last look."""
        if not self._untold:
            return self._folded(self._log.fresh())
        with _without_collections():
            return self._folded(self._log.fresh())

    def _folded(self, events: Sequence[Event]) -> News:
        for event in events:
            self.reports[event.round, event.source].add(event)
        steps = self._steps.add(events)
        self._usage.add(events, steps)
        members = self._progress.add(events) | self._untold
        self._untold = set()
        return News(events, members, steps)
