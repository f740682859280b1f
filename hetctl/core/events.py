"""Events: how compute nodes report, one file of JSON lines per writer."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetctl.core.event_forms import well_formed

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
    """Appends events to one file; each is on its way to the disk before `write` returns.

    Several threads may write.
    """

    def __init__(self, folder: Path, source: str) -> None:
        self.path = folder / f"{source}.jsonl"
        self._lock = threading.Lock()

    def write(self, kind: str, **data: Any) -> None:
        """Append one event, on a line of its own even if the file ends in the middle of one.

        Raises
        ------
        OSError
            If the disk is full or read-only; then nothing was written.
        """
        line = (json.dumps({"kind": kind, "time": time.time(), **data}, allow_nan=False) + "\n").encode()
        with self._lock:
            self._append(line)

    def _append(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
            if _ends_torn(descriptor):
                line = b"\n" + line
            written = os.write(descriptor, line)
            if written < len(line):
                # The next event must not be appended to half of this one.
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class SteadyWriter(EventWriter):
    """Writes events; one that cannot be written is reported, and the writer goes on.

    Parameters
    ----------
    on_failure : callable
        Told of each event that was lost.
    """

    def __init__(self, folder: Path, source: str, on_failure: Callable[[OSError], None]) -> None:
        super().__init__(folder, source)
        self._on_failure = on_failure

    def write(self, kind: str, **data: Any) -> None:
        """Append one event, if the disk lets it."""
        try:
            super().write(kind, **data)
        except OSError as error:
            self._on_failure(error)


def _ends_torn(descriptor: int) -> bool:
    """Whether the last line was cut short, by a crash of its writer or of its node."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def read_events(path: Path) -> Iterator[Event]:
    """Read the whole lines of an event file; torn and garbled ones are passed over, their numbers kept."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return
    for seq, line in enumerate(text.split(b"\n")[:-1]):
        try:
            data = json.loads(line)
            kind, when = str(data.pop("kind")), float(data.pop("time"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue
        if math.isfinite(when) and well_formed(kind, data):
            yield Event(path.stem, seq, kind, when, data)


def read_folder(folder: Path) -> list[Event]:
    """Read all event files of a folder, in order of time."""
    events = [event for path in sorted(folder.glob("*.jsonl")) for event in read_events(path)]
    return sorted(events, key=lambda event: (event.time, event.source, event.seq))
