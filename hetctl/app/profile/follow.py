"""Following profiling jobs to their end, or until a signal says to leave them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hetctl.app.interruptions import Interruption, Interruptions
from hetctl.app.profile.folder import ended_in
from hetctl.app.profile.jobs import (
    JobGroup,
    MeasureRequest,
    ProfileJob,
    groups_under_way,
    submit,
    under_way,
)
from hetctl.catalog.catalog import Catalog
from hetctl.cluster.batch.base import BatchSystem, SubmissionInDoubtError
from hetctl.model.errors import InterruptedCommandError
from hetctl.storage.profile_request import ProfileTarget

LOOK_S = 0.5
"""Between two looks at the files of a job."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Between two questions to the batch system; each pause is twice the one before it."""


class ProfileMonitor:
    """Progress of a profiling command, and the decision after Ctrl-C; this one is silent, and cancels."""

    can_ask = False
    """True if `cancels` asks a person, who may press Ctrl-C once more."""

    def adopted(self, ids: Sequence[str], points: int) -> None:
        """Report that jobs of an earlier command measure so many of the points already."""

    def progressed(self, done: int, total: int) -> None:
        """Report how many points are measured or have failed."""

    def cancels(self, ids: Sequence[str]) -> bool:  # noqa: ARG002
        """Decide whether the jobs are cancelled, or left measuring."""
        return True


@dataclass(frozen=True)
class Attending:
    """Submitting and following jobs such that a signal may come at any time."""

    batch: BatchSystem
    catalog: Catalog
    interruptions: Interruptions
    observer: ProfileMonitor
    profiles: Path

    def submit(self, request: MeasureRequest) -> JobGroup:
        """Submit jobs, unless a signal has come; one that comes meanwhile is kept."""
        self.interruptions.check()
        try:
            return submit(self.batch, self.profiles, request)
        except SubmissionInDoubtError:
            self.interruptions.check()  # Ctrl-C ends sbatch as well
            raise

    def under_way(self, ensemble: str, site: str) -> list[JobGroup]:
        """Return the groups of earlier commands that have a job under way."""
        with self.interruptions.heeded():
            return groups_under_way(self.batch, self.catalog, self.profiles, ensemble, site)

    def attend(self, groups: Sequence[JobGroup], points: Sequence[ProfileTarget]) -> None:
        """Follow jobs until they are over, or a signal comes; keep what is measured by then."""
        jobs = [job for group in groups for job in group.jobs]
        try:
            with self.interruptions.heeded():
                follow(self.batch, jobs, points, self.observer.progressed)
        except Interruption as interruption:
            self._end(interruption, [job.id for job in jobs])
        finally:
            for group in groups:
                group.ingest(self.catalog)
        for group in groups:
            group.close(self.catalog)

    def _end(self, interruption: Interruption, ids: Sequence[str]) -> NoReturn:
        """Cancel the jobs, or leave them measuring."""
        if interruption.number == signal.SIGINT and self._cancels(ids):
            self.batch.cancel(ids)
            leave(interruption, naming(ids, "is cancelled", "are cancelled"), "what was measured is kept")
        leave(
            interruption,
            naming(ids, "goes on measuring", "go on measuring"),
            "`hetctl profile` follows it to its end, `hetctl profile show` shows what is measured so far",
        )

    def _cancels(self, ids: Sequence[str]) -> bool:
        """Ask where there is somebody to answer; a second signal means that the jobs are left measuring."""
        if not self.observer.can_ask:
            return True
        try:
            with self.interruptions.heeded():
                return self.observer.cancels(ids)
        except Interruption:
            return False


def follow(
    batch: BatchSystem,
    jobs: Sequence[ProfileJob],
    points: Iterable[ProfileTarget],
    on_progress: Callable[[int, int], None],
) -> None:
    """Look at the jobs' files until all are over; ask the batch system now and then.

    Parameters
    ----------
    points : iterable of Point
        Those whose progress is reported.
    """
    sources = {point.source for point in points}
    waiting = list(jobs)
    for ask in moments_to_ask():
        waiting = under_way(batch, waiting) if ask else [job for job in waiting if not job.has_returned]
        ended = set().union(*(ended_in(job.folder) for job in jobs))
        on_progress(len(ended & sources), len(sources))
        if not waiting:
            return
        time.sleep(LOOK_S)


def moments_to_ask() -> Iterator[bool]:
    """Say of each look at the files whether it is time to ask the batch system as well."""
    pause, asked_at = FIRST_PAUSE_S, time.monotonic()
    while True:
        due = time.monotonic() >= asked_at + pause
        if due:
            pause, asked_at = min(2 * pause, LONGEST_PAUSE_S), time.monotonic()
        yield due


def leave(interruption: Interruption, what: str, hint: str) -> NoReturn:
    """End the command as a signal asks.

    Raises
    ------
    InterruptedCommandError
        Always.
    """
    name = signal.Signals(interruption.number).name
    raise InterruptedCommandError(interruption.number, f"{name}: {what}", hint) from None


def naming(ids: Sequence[str], one: str, several: str) -> str:
    """Begin a sentence about jobs: ``job 4711 is cancelled``."""
    return f"job {ids[0]} {one}" if len(ids) == 1 else f"jobs {', '.join(ids)} {several}"
