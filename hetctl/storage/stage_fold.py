"""Layouts and stages of a run's members that train as pipelines, derived from its events."""

from __future__ import annotations

from collections.abc import Iterable

from hetctl.model.event_records import Stages, TaskStarted
from hetctl.model.events import DRIVER, Event
from hetctl.storage.event_log import EventFile
from hetctl.storage.paths import RunFolder


class StageFold:
    """Newest task and newest stages of each member, derived from events in whatever order they are read."""

    def __init__(self) -> None:
        self._tasks: dict[str, Event] = {}
        self._stages: dict[str, Event] = {}

    def add(self, events: Iterable[Event]) -> None:
        """Fold more events; an event that was folded before changes nothing."""
        for event in events:
            if event.kind == "stages":
                _keep_newest(self._stages, event.source, event)
            elif event.source == DRIVER and event.kind == "task_started" and event.record.pipeline:
                _keep_newest(self._tasks, event.record.member, event)

    def task_of(self, member: str) -> TaskStarted | None:
        """Return the newest task of a member as a pipeline; None before the first."""
        event = self._tasks.get(member)
        return event.record if event else None

    def stages_of(self, member: str) -> Stages | None:
        """Return the newest report of a member's stages; None before the first."""
        event = self._stages.get(member)
        return event.record if event else None


def _keep_newest(found: dict[str, Event], member: str, event: Event) -> None:
    if member not in found or found[member].order < event.order:
        found[member] = event


class StageLog:
    """Reader of the stages of a run; each call reads only what was appended since the last one.

    Parameters
    ----------
    members : iterable of str
        Members that train as pipelines.
    """

    def __init__(self, folder: RunFolder, members: Iterable[str]) -> None:
        self._fold = StageFold()
        self._files = [EventFile(str(folder.events_of(name)), name) for name in (DRIVER, *members)]

    def refresh(self) -> StageFold:
        """Return the fold of all events so far."""
        for file in self._files:
            self._fold.add(file.read_new())
        return self._fold
