"""Conversion of a run's events to rows of the epochs: pure, and independent of the order of arrival."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hetctl.model.errors import BadInputError
from hetctl.model.events import DRIVER, Event
from hetctl.model.serialization import decode, encode
from hetctl.model.training_progress import EpochResult

Row = dict[str, Any]


def epoch_rows(events: Iterable[Event]) -> list[Row]:
    """Return one row per report of an epoch, repeated reports of an epoch included.

    Raises
    ------
    BadInputError
        If a report is not an EpochResult.
    """
    return [
        {
            "member": event.source,
            "round": event.round,
            "reported_at": event.time,
            "seq": event.seq,
            **encode(_epoch_result(event)),
        }
        for event in events
        if event.kind == "epoch" and event.source != DRIVER
    ]


def _epoch_result(event: Event) -> EpochResult:
    try:
        return decode(EpochResult, dict(event.data))
    except ValueError as error:
        raise BadInputError(
            f"line {event.seq + 1} of the events of {event.source!r} is not an epoch: {error}",
            "the file was not written by hetctl; remove the line's text, but not the line",
        ) from None
