"""Event files: the reports of compute nodes, one file of JSON lines per writer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hetctl.model.errors import is_transient
from hetctl.model.events import Event, in_order
from hetctl.storage.atomic_io import file_mode, sync_folder
from hetctl.storage.patience import NO_RETRY, Patience

HEAD = b'{"kind": '
"""Beginning of every line of an event file."""
Fields = tuple[str, Mapping[str, Any]]
"""Kind and data of an event to write."""


class EventWriter:
    """Writer that appends events to one file; each event is synced to disk before `write` returns.

    Several threads may use it.

    Parameters
    ----------
    round_index : int or None
        Index of the round that all its events belong to; None if there are no rounds.
    on_written : callable
        Function called after each event is on disk, with the length of the file in bytes.
    queue : EventQueue or None
        Queue in which events wait while the disk does not answer; None: `patience` does.

    Attributes
    ----------
    patience : Patience
        Patience with a file system that does not answer.
    """

    def __init__(
        self,
        folder: Path,
        source: str,
        round_index: int | None = None,
        on_written: Callable[[int], None] = lambda _: None,
        patience: Patience = NO_RETRY,
        queue: EventQueue | None = None,
    ) -> None:
        self.path = folder / f"{source}.jsonl"
        self.patience = patience
        self._common = {} if round_index is None else {"round": round_index}
        self._on_written, self._queue = on_written, queue
        self._lock = threading.Lock()

    def write(self, kind: str, **data: Any) -> None:
        """Append one event, as `write_all` does."""
        self.write_all((kind, data))

    def write_all(self, *events: Fields) -> None:
        """Append events, each on a new line, even if the file ends with an incomplete line.

        They take the disk as long as one. A crash may leave the first ones alone.

        Raises
        ------
        OSError
            If the disk is full (nothing is then written), or does not answer for longer than `patience`.
        """
        if not events:
            return
        common = {"time": time.time(), **self._common}
        lines = (json.dumps({"kind": kind, **common, **data}, allow_nan=False) for kind, data in events)
        append = _Append(self.path, "".join(f"{line}\n" for line in lines).encode())
        if self._queue:
            self._queue.add(append, self._on_written)
            return
        with self._lock:
            self._on_written(self.patience.call(append))


class _Append:
    """Append of lines to a file; each call after an error completes what the earlier ones began.

    After an error of write(2) or fsync(2) the lines may be in the file and on the disk, or not. They are
    written again, because the kernel forgets pages that it could not write: another fsync(2) would succeed
    without them. They go to the same place, so that the file has them once.
    """

    def __init__(self, path: Path, lines: bytes) -> None:
        self._path, self._lines = path, lines
        self._start: int | None = None
        """Length of the file before the first attempt; the lines can only be behind it."""

    def __call__(self) -> int:
        """Write the lines to the disk; return the new length of the file in bytes."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                os.fchmod(descriptor, file_mode(self._path.parent))
            place = self._found(descriptor)
            if place is None:
                self._append(descriptor)
            else:
                # pwrite(2) would append in spite of its offset.
                fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
                os.pwrite(descriptor, self._lines, place)
            # An epoch that was reported counts as trained, whatever happens to the node afterwards.
            os.fsync(descriptor)
            if not self._start:
                sync_folder(self._path.parent)
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def _found(self, descriptor: int) -> int | None:
        """Return the place of the lines in the file; None if they are not there."""
        length = os.fstat(descriptor).st_size
        if self._start is None:
            self._start = length
            return None
        place = os.pread(descriptor, max(0, length - self._start), self._start).find(self._lines)
        return None if place < 0 else self._start + place

    def _append(self, descriptor: int) -> None:
        lines = b"\n" + self._lines if _ends_incomplete(descriptor) else self._lines
        # One write(2) with O_APPEND: lines of threads and processes that write at once do not mix.
        written = os.write(descriptor, lines)
        if written < len(lines):
            # Remove what is partial, or the next event would be appended to it.
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))


class EventQueue:
    """Queue of one thread's events, in order; they wait while the disk does not answer.

    Parameters
    ----------
    on_failure : callable
        Function called with the error if events have to wait, or if one is lost on a full disk.

    Attributes
    ----------
    error : OSError or None
        Error of writing the last event; None if it was written.
    """

    def __init__(self, folder: Path, on_failure: Callable[[OSError], None]) -> None:
        self._folder, self._on_failure = folder, on_failure
        self._waiting: deque[tuple[_Append, Callable[[int], None]]] = deque()
        self.error: OSError | None = None

    def writer(
        self, source: str, round_index: int, on_written: Callable[[int], None] = lambda _: None
    ) -> EventWriter:
        """Return a writer of events of one file, as in `EventWriter`."""
        return EventWriter(self._folder, source, round_index, on_written, queue=self)

    def add(self, append: _Append, on_written: Callable[[int], None]) -> None:
        """Add an event; write it now if possible."""
        self._waiting.append((append, on_written))
        self.error = None
        try:
            self.flush()
        except OSError as error:
            self.error = error
            self._on_failure(error)

    def flush(self) -> None:
        """Write the events that wait.

        Raises
        ------
        OSError
            If one cannot be written. After a transient error it waits with all later ones; after any other
            it is lost.
        """
        while self._waiting:
            append, on_written = self._waiting[0]
            try:
                length = append()
            except OSError as error:
                if not is_transient(error):
                    self._waiting.popleft()
                raise
            self._waiting.popleft()
            on_written(length)


def _ends_incomplete(descriptor: int) -> bool:
    """Return true if the last line is incomplete because its writer or its node crashed."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def read_events(path: Path, kinds: Collection[str] | None = None) -> Iterator[Event]:
    """Read the complete lines of an event file; incomplete or corrupt ones are skipped but counted.

    Parameters
    ----------
    kinds : collection of str or None
        Kinds of events to read; None: all.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return
    lines = text.split(b"\n")[:-1]
    if kinds is None:
        yield from parse_events(lines, path.stem)
        return
    heads = tuple(HEAD + json.dumps(kind).encode() for kind in kinds)
    for seq, line in enumerate(lines):
        if line.startswith(heads) or not line.startswith(HEAD):
            yield from (event for event in parse_events([line], path.stem, seq) if event.kind in kinds)


def read_folder(folder: Path) -> list[Event]:
    """Read all event files of a folder, sorted by time."""
    events = [event for path in sorted(folder.glob("*.jsonl")) for event in read_events(path)]
    return in_order(events)


def parse_events(lines: Iterable[bytes], source: str, first_seq: int = 0) -> Iterator[Event]:
    """Convert lines of a file to events; incomplete or corrupt ones are skipped.

    Parameters
    ----------
    first_seq : int
        Number of the first line.
    """
    # Agents and ranks only write; without these classes they start sooner.
    from hetctl.model.event_records import record_of

    for seq, data in enumerate(_values(list(lines)), first_seq):
        try:
            kind, when, index = str(data.pop("kind")), float(data.pop("time")), data.pop("round", 0)
            record = record_of(kind, data)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue
        # Python reads NaN and Infinity in JSON, and bool is a subclass of int.
        if math.isfinite(when) and type(index) is int:
            # Faster than __init__, and does not decode the record again.
            event = object.__new__(Event)
            vars(event).update(
                source=source, seq=seq, kind=kind, time=when, data=data, round=index, record=record
            )
            yield event


def _values(lines: list[bytes]) -> list[Any]:
    """Decode JSON, one value per line; None for an incomplete or corrupt line."""
    if all(line.startswith(HEAD) and line.endswith(b"}") for line in lines):
        # Decode all lines at once: complete lines have balanced brackets; an incomplete one unbalances all.
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
