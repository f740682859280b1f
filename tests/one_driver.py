"""Proof from a run's events that one driver trained at any time, and each epoch counts once.

Rounds are numbered through all jobs, and each driver begins with the number after those that it has read. An
event with a lower number than a driver's first is thus one of an earlier driver, whatever its clock says.
Lines of a file are in the order of their writing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from hetctl.model.events import DRIVER, Event

OF_TRAINERS = frozenset(
    {"started", "first_step", "rate", "epoch", "checkpoint", "converged", "stopped", "failed"}
)


def problems(events: Iterable[Event], *, epochs: Mapping[str, int] | None = None) -> list[str]:
    """Return what contradicts that one driver trained at any time, and that each epoch counts once.

    Parameters
    ----------
    epochs : mapping of str to int or None
        Epochs that each member must have finished, with a checkpoint after each; None: they are not checked.
    """
    files: defaultdict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.seq):
        files[event.source].append(event)
    drivers = files.pop(DRIVER, [])
    found = [*_of_drivers(drivers)]
    began = [event for event in drivers if event.kind == "job_started"]
    for name, lines in files.items():
        found += _of_trainers(name, [e for e in lines if e.kind in OF_TRAINERS], began)
    for name, count in (epochs or {}).items():
        found += _of_epochs(name, files[name], count)
    return found


def _of_drivers(lines: Iterable[Event]) -> Iterator[str]:
    """Compare each line of the drivers' file with the newest driver."""
    opened: dict[int, int] = {}
    job, first = -1, 0
    for event in lines:
        own = event.data.get("job", job)
        if event.kind == "job_started":
            if (event.round, own) < (first, job):
                yield f"job {own} began at round {event.round}, after job {job} at round {first}"
            job, first = own, event.round
        elif event.round < first or own != job:
            yield f"{event.kind} of round {event.round} after job {job} began at round {first}"
        if event.kind == "round_started":
            if event.round in opened:
                yield f"round {event.round} was started by job {opened[event.round]} and by job {own}"
            opened[event.round] = own


def _of_trainers(name: str, lines: Iterable[Event], began: Iterable[Event]) -> Iterator[str]:
    """Compare each line of a member's file with those before, and with the starts of drivers."""
    newest = 0
    for event in lines:
        if event.round < newest:
            yield f"{name}: {event.kind} of round {event.round} after one of round {newest}"
        newest = max(newest, event.round)
        for start in began:
            # Both by the clock of this machine.
            if event.round < start.round and event.time > start.time:
                yield f"{name}: {event.kind} of round {event.round} after job {start.data['job']} began"


def _of_epochs(name: str, lines: Iterable[Event], count: int) -> Iterator[str]:
    """Follow the epochs of a member from start to start."""
    finished: list[float] = []
    for event in lines:
        if event.kind == "started" and event.data["epochs"] != len(finished):
            # One that was killed between its checkpoint and its event reports the epoch when it resumes.
            if event.data["epochs"] != len(finished) + 1:
                yield f"{name}: begins after {event.data['epochs']} epochs, and {len(finished)} are reported"
        elif event.kind == "epoch":
            number, at = event.data["epoch"], event.data["finished_at"]
            if number == len(finished) + 1:
                finished.append(at)
            elif not (number <= len(finished) and finished[number - 1] == at):
                yield f"{name}: epoch {number} is trained after epoch {len(finished)}"
    if len(finished) != count:
        yield f"{name}: {len(finished)} of {count} epochs are reported"
