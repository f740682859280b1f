"""Conversion of a run's events to rows of its tables: pure, and independent of the order of arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hetctl.model.errors import BadInputError
from hetctl.model.events import DRIVER, Event
from hetctl.model.serialization import decode, encode
from hetctl.model.training_progress import EpochResult

Row = dict[str, Any]

ROUND_COLUMNS = ("job", "predicted_s", "started_at", "ended_at", "ended_by")
ALLOCATION_COLUMNS = (
    *("gpus", "mode", "rate", "placement"),
    *("started_at", "ended_at", "exit_code", "cause"),
)
CHECKPOINT_COLUMNS = ("epoch", "part_samples", "path", "bytes", "sha256", "seconds")

# Kind of event -> columns of its round.
OF_ROUND: dict[str, Callable[[Event], Row]] = {
    "round_started": lambda event: {"started_at": event.time, **_pick(event, "job", "predicted_s")},
    "round_ended": lambda event: {"ended_at": event.time, **_pick(event, "ended_by")},
}

# Kind of event -> columns of the allocation of its member. A step that is repeated in the same
# round replaces the earlier one.
OF_ALLOCATION: dict[str, Callable[[Event], Row]] = {
    "step_started": lambda event: {
        **dict.fromkeys(("ended_at", "exit_code", "cause")),
        **_pick(event, "gpus", "mode", "rate", "placement"),
        "started_at": event.time,
    },
    "step_ended": lambda event: {"ended_at": event.time, **_pick(event, "exit_code", "cause")},
}


def concerns_round(event: Event) -> bool:
    """Return true if an event changes the row of a round or of one of its allocations."""
    return event.source == DRIVER and (event.kind in OF_ROUND or event.kind in OF_ALLOCATION)


def round_rows(driver: Iterable[Event]) -> list[Row]:
    """Fold the drivers' events, in order, into one row per round."""
    empty = dict.fromkeys(ROUND_COLUMNS)
    rows: dict[int, Row] = {}
    for event in filter(concerns_round, driver):
        row = rows.setdefault(event.round, {"round": event.round, **empty})
        if event.kind in OF_ROUND:
            row.update(OF_ROUND[event.kind](event))
    return list(rows.values())


def allocation_rows(driver: Iterable[Event]) -> list[Row]:
    """Fold the drivers' events, in order, into one row per member and round."""
    empty = dict.fromkeys(ALLOCATION_COLUMNS)
    rows: dict[tuple[int, str], Row] = {}
    for event in driver:
        if event.kind in OF_ALLOCATION and "member" in event.data:
            name = str(event.data["member"])
            row = rows.setdefault((event.round, name), {"round": event.round, "member": name, **empty})
            row.update(OF_ALLOCATION[event.kind](event))
    return list(rows.values())


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


def checkpoint_rows(events: Iterable[Event]) -> list[Row]:
    """Return one row per written checkpoint."""
    return [
        {
            "member": event.source,
            "round": event.round,
            "seq": event.seq,
            "saved_at": event.time,
            **_pick(event, *CHECKPOINT_COLUMNS),
        }
        for event in events
        if event.kind == "checkpoint" and event.source != DRIVER
    ]


def _pick(event: Event, *names: str) -> Row:
    return {name: event.data.get(name) for name in names}


def _epoch_result(event: Event) -> EpochResult:
    try:
        return decode(EpochResult, dict(event.data))
    except ValueError as error:
        raise BadInputError(
            f"line {event.seq + 1} of the events of {event.source!r} is not an epoch: {error}",
            "the file was not written by hetctl; remove the line's text, but not the line",
        ) from None
