"""Events: how compute nodes report, one file of JSON lines per writer."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hetctl.model.events import Event, in_order
from hetctl.storage.event_schema import well_formed

HEAD = b'{"kind": '
"""Beginning of every line of an event file."""


class EventWriter:
    """Appends events to one file; each is on its way to the disk before `write` returns.

    Several threads may write.

    Parameters
    ----------
    round_index : int or None
        Of the round that all its events tell of; None where there are no rounds.
    on_written : callable
        Told of the length of the file, in bytes, after each event, once that is on the disk.
    """

    def __init__(
        self,
        folder: Path,
        source: str,
        round_index: int | None = None,
        on_written: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.path = folder / f"{source}.jsonl"
        self._common = {} if round_index is None else {"round": round_index}
        self._on_written = on_written
        self._lock = threading.Lock()

    def write(self, kind: str, **data: Any) -> None:
        """Append one event, on a line of its own even if the file ends in the middle of one.

        Raises
        ------
        OSError
            If the disk is full or read-only; then nothing was written.
        """
        event = {"kind": kind, "time": time.time(), **self._common, **data}
        line = (json.dumps(event, allow_nan=False) + "\n").encode()
        with self._lock:
            self._on_written(self._append(line))

    def _append(self, line: bytes) -> int:
        """Append a line; return the length of the file then."""
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
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)


class BestEffortEventWriter(EventWriter):
    """Writes events; one that cannot be written is reported, and the writer goes on.

    Parameters
    ----------
    on_failure : callable
        Told of each event that was lost.
    """

    def __init__(
        self, folder: Path, source: str, round_index: int, on_failure: Callable[[OSError], None]
    ) -> None:
        super().__init__(folder, source, round_index)
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
    yield from parse_events(text.split(b"\n")[:-1], path.stem)


def read_folder(folder: Path) -> list[Event]:
    """Read all event files of a folder, in order of time."""
    events = [event for path in sorted(folder.glob("*.jsonl")) for event in read_events(path)]
    return in_order(events)


def parse_events(lines: Iterable[bytes], source: str, first_seq: int = 0) -> Iterator[Event]:
    """Turn lines of a file into events; torn and garbled ones are passed over.

    Parameters
    ----------
    first_seq : int
        Number of the first line.
    """
    for seq, data in enumerate(_values(list(lines)), first_seq):
        try:
            kind, when, index = str(data.pop("kind")), float(data.pop("time")), data.pop("round", 0)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue
        if math.isfinite(when) and type(index) is int and well_formed(kind, data):
            yield Event(source, seq, kind, when, data, index)


def _values(lines: list[bytes]) -> list[Any]:
    """Decode JSON, a value for each line; None for a torn or garbled one."""
    if all(line.startswith(HEAD) and line.endswith(b"}") for line in lines):
        # In one go: whole lines are balanced, so that a torn one among them leaves all unbalanced.
        with contextlib.suppress(ValueError, RecursionError):
            values = json.loads(b"[" + b",".join(lines) + b"]")
            if len(values) == len(lines):
                return list(values)
    return [_value(line) for line in lines]


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
