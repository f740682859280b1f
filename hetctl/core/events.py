"""Events: how compute nodes report, one file of JSON lines per writer."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRIVER = "driver"


@dataclass(frozen=True)
class Event:
    """One line of an event file.

    Parameters
    ----------
    source : str
        Name of the file without its ending: a member, or ``driver``.
    seq : int
        Line number from 0; (round, source, seq) identifies the event for ever.
    kind : str
        ``step_started``, ``epoch``, ``converged``, ..: see docs/files.md.
    time : float
        Seconds since the epoch, on the writer's clock.
    """

    source: str
    seq: int
    kind: str
    time: float
    data: Mapping[str, Any]


class EventWriter:
    """Appends events to one file; each is on its way to the disk before `write` returns."""

    def __init__(self, folder: Path, source: str) -> None:
        self.path = folder / f"{source}.jsonl"

    def write(self, kind: str, **data: Any) -> None:
        """Append one event."""
        line = (json.dumps({"kind": kind, "time": time.time(), **data}, allow_nan=False) + "\n").encode()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
            written = os.write(descriptor, line)
            if written < len(line):
                # The next event must not be appended to half of this one.
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_events(path: Path) -> Iterator[Event]:
    """Read the whole lines of an event file; a torn line is passed over, its number is kept."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return
    for seq, line in enumerate(text.split(b"\n")[:-1]):
        try:
            data = json.loads(line)
            kind, when = str(data.pop("kind")), float(data.pop("time"))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        yield Event(path.stem, seq, kind, when, data)


def read_folder(folder: Path) -> list[Event]:
    """Read all event files of a folder, in order of time."""
    events = [event for path in sorted(folder.glob("*.jsonl")) for event in read_events(path)]
    return sorted(events, key=lambda event: (event.time, event.source, event.seq))
