"""State of a run folded from all of its events at once, against which the incremental folds are held."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hetctl.model.ensemble import Ensemble
from hetctl.model.events import Event
from hetctl.model.run import Usage
from hetctl.model.training_progress import Progress
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import ProgressFold, events_in
from hetctl.storage.task_fold import TaskFold, UsageFold


def progress_of(ensemble: Ensemble, events: Iterable[Event], retries: int) -> dict[str, Progress]:
    """Fold a run's events, in the order in which they are given, into the progress of every member.

    An epoch counts once, however often it is reported: a trainer that was killed between its checkpoint and
    its event reports the epoch again when it resumes. One that resumes from an earlier checkpoint trains the
    later epochs again: their first reports count no more. A member that converged by a limit of epochs that
    was raised since continues.
    """
    fold = ProgressFold(ensemble, retries)
    fold.add(replace(event, time=float(number)) for number, event in enumerate(events))
    return dict(fold.progress)


def progress_in(folder: RunFolder, ensemble: Ensemble, retries: int) -> dict[str, Progress]:
    """Fold all events of a run."""
    return progress_of(ensemble, events_in(folder), retries)


def usage_of(events: Iterable[Event], now: float) -> Usage:
    """Return the resources used according to a run's events."""
    events, fold = list(events), UsageFold()
    fold.add(events, TaskFold().add(events))
    return fold.used(now)
