"""Facts of a run other than progress and steps: its jobs, its rounds, its first and last event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from hetctl.model.events import DRIVER, Event, in_order
from hetctl.model.searches import SEARCH_ENDED, TRIAL
from hetctl.storage.snapshot import Row, row_of

OF_JOBS = frozenset({"job_started", "job_ended", "node_failed", "node_joined"})
"""Kinds of event about jobs."""


class RunFacts:
    """Facts of a run, kept up to date with its events."""

    def __init__(self) -> None:
        self.rounds: dict[int, dict[str, Event]] = defaultdict(dict)
        """Events of the start and end of a round, by its index."""
        self.jobs: list[Event] = []
        self.trials: dict[str, Event] = {}
        """Latest requests of the search for each of its trials, by member."""
        self.search_ended: str | None = None
        """Reason for which the search asks for no more trials; None if it may."""
        self.first_step: Event | None = None
        self.began_at: float | None = None
        self.last: Event | None = None

    def add(self, events: Iterable[Event]) -> None:
        """Add events, in whatever order they are read."""
        for event in events:
            self.began_at = event.time if self.began_at is None else min(self.began_at, event.time)
            self.last = _later(self.last, event)
            if event.kind == "first_step":
                self.first_step = _earlier(self.first_step, event)
            elif event.source == DRIVER and event.kind == TRIAL:
                name = str(event.data["member"])
                self.trials[name] = _later(self.trials.get(name), event)
            elif event.source == DRIVER and event.kind == SEARCH_ENDED:
                self.search_ended = str(event.data["reason"])
            elif event.source == DRIVER and event.kind in OF_JOBS:
                self.jobs = in_order([*self.jobs, event])
            elif event.source == DRIVER and event.kind in ("round_started", "round_ended"):
                events_of_round = self.rounds[event.round]
                events_of_round[event.kind] = _later(events_of_round.get(event.kind), event)

    def rows(self) -> list[Any]:
        """Return the argument of `restore`."""
        rounds = [row_of(event) for events in self.rounds.values() for event in events.values()]
        jobs = [row_of(event) for event in self.jobs]
        ends = [event and row_of(event) for event in (self.first_step, self.last)]
        search = [[row_of(event) for event in self.trials.values()], self.search_ended]
        return [rounds, jobs, search, *ends, self.began_at]

    def restore(self, rows: list[Any]) -> None:
        """Continue from an earlier state."""
        rounds, jobs, (trials, self.search_ended), first_step, last, self.began_at = rows
        self.trials = {str(event.data["member"]): event for event in map(_event, trials)}
        for event in map(_event, rounds):
            self.rounds[event.round][event.kind] = event
        self.jobs = [_event(row) for row in jobs]
        self.first_step, self.last = (row and _event(row) for row in (first_step, last))


def _event(row: Row) -> Event:
    return Event(*row)


def _later(one: Event | None, other: Event) -> Event:
    return other if one is None or one.order <= other.order else one


def _earlier(one: Event | None, other: Event) -> Event:
    return other if one is None or other.order < one.order else one
