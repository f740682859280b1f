"""Events: the reports of the driver and trainers of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

DRIVER = "driver"


Order = tuple[float, str, int]
"""Sort key of an event among all events of a run: time in seconds, source, line number."""


@dataclass(frozen=True)
class Event:
    """One line of an event file.

    Parameters
    ----------
    source : str
        Name of the file without its suffix: a member, or ``driver``.
    seq : int
        Line number from 0; (source, seq) identifies the event permanently.
    kind : str
        ``task_started``, ``epoch``, ``converged``, ..: see docs/files.md.
    time : float
        Seconds since the epoch, on the writer's clock.
    round : int
        Index of the round that it belongs to, or in which the job starts; 0 if there are no rounds.
    """

    source: str
    seq: int
    kind: str
    time: float
    data: Mapping[str, Any]
    round: int = 0

    @cached_property
    def record(self) -> Any:
        """Its fields as the type that `FORMS` has for its kind; ValueError if it is corrupt."""
        # Those who only write events start sooner without the classes of all kinds.
        from hetctl.model.event_records import record_of

        return record_of(self.kind, self.data)

    @property
    def order(self) -> Order:
        """Sort key: time; for equal times source and line number."""
        # Clocks of nodes differ and times may be equal; source and line then settle the order.
        return self.time, self.source, self.seq


def in_order(events: Iterable[Event]) -> list[Event]:
    """Sort events by time."""
    return sorted(events, key=lambda event: event.order)
