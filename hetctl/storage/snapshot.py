"""Snapshot of a run's state in one file: a cache from which folds of its events continue.

Values are stored as rows, which read faster than mappings by name. The first line of the file has all parts
but two. In these, each member has its own line, because `status` of a large run reads those of few members.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar
from zlib import crc32

from hetctl.model.events import Event, Order, in_order
from hetctl.model.values import dataclass
from hetctl.storage.atomic_io import private_file

T = TypeVar("T")
Row = list[Any]
FORMAT = 5
"""Number that changes with the format of lines; that of rows follows from the fields of their dataclasses."""
KEY = "of"
"""Key of the identity of the state; the state of another run or in another format is ignored."""
LINES = "lines"
"""Key of the length in bytes and the checksum (CRC-32) of each line, by part and member, in order."""


class StaleSnapshotError(Exception):
    """Snapshot that does not match the files, or that another one has replaced.

    Files are shorter, or have events that belong before its end.
    """


class UnreadLine(NamedTuple):
    """Line of a snapshot's file, which `bytes` reads.

    `bytes` raises StaleSnapshotError if the file has other data there or is gone, and OSError if it cannot be
    read.
    """

    path: Path
    offset: int
    length: int
    checksum: int

    def __bytes__(self) -> bytes:
        """Return the line without its end."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                line = file.read(self.length)
        except FileNotFoundError:
            raise StaleSnapshotError from None
        if crc32(line) != self.checksum:
            raise StaleSnapshotError
        return line


Line = bytes | memoryview | UnreadLine
Lines = Mapping[str, Line]


@functools.cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.cache
def _values_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*_names_of(kind))


def row_of(value: Any) -> Row:
    """Return the fields of a dataclass with several fields, in their order."""
    kind: Any = type(value)
    return list(_values_of(kind)(value))


def from_row(kind: type[T], row: Iterable[Any]) -> T:
    """Return a frozen dataclass without slots from its fields; its own __init__ takes three times as long."""
    columns: Any = kind
    made = object.__new__(kind)
    made.__dict__.update(zip(_names_of(columns), row, strict=True))
    return made


def from_fields(kind: type[T], **fields: Any) -> T:
    """Return a frozen dataclass without slots from some fields; the class itself has the others' defaults."""
    made = object.__new__(kind)
    made.__dict__.update(fields)
    return made


def with_fields(value: T, **fields: Any) -> T:
    """Return a frozen dataclass without slots with other fields, faster than `dataclasses.replace`."""
    made = object.__new__(type(value))
    made.__dict__.update(value.__dict__, **fields)
    return made


def key_of(of: Any, *kinds: type) -> str:
    """Return the identity of a snapshot: JSON values on which the state depends, and the format of rows."""
    # Rows have no names: a version with other fields, or in another order, must not read them.
    columns = [_names_of(kind) for kind in kinds]
    return hashlib.sha256(json.dumps([FORMAT, of, columns, sys.byteorder]).encode()).hexdigest()


@dataclass(frozen=True)
class Snapshot:
    """State of a run.

    Parameters
    ----------
    parts : mapping of str to Any
        Parts of the state by name, as JSON values.
    lines : mapping of str to Lines
        More parts by name: a line by member, without its end.
    """

    parts: Mapping[str, Any]
    lines: Mapping[str, Lines]


def write_snapshot(path: Path, key: str, snapshot: Snapshot) -> None:
    """Replace the snapshot of a run; OSError if the disk is full or read-only."""
    lines = {part: {name: bytes(line) for name, line in of.items()} for part, of in snapshot.lines.items()}
    places = {part: {n: (len(line), crc32(line)) for n, line in of.items()} for part, of in lines.items()}
    with private_file(path, durable=False) as file:
        file.writelines((compact({KEY: key, LINES: places, **snapshot.parts}).encode(), b"\n"))
        file.writelines(line + b"\n" for of in lines.values() for line in of.values())


def read_snapshot(path: Path, key: str, *, lazily: bool = False) -> Snapshot | None:
    """Return the snapshot, or None if there is no valid one.

    Parameters
    ----------
    lazily : bool
        If true, each line is read when it is used.
    """
    try:
        text, size = _begin_of(path) if lazily else _all_of(path)
        begin = text.index(b"\n") + 1
        parts = json.loads(text[:begin])
    except (OSError, ValueError):
        return None
    if not isinstance(parts, dict) or parts.get(KEY) != key:
        return None
    lines: dict[str, dict[str, Line]] = {}
    for part, of in parts[LINES].items():
        lines[part] = {}
        for name, (length, checksum) in of.items():
            if lazily:
                lines[part][name] = UnreadLine(path, begin, length, checksum)
            elif crc32(line := memoryview(text)[begin : begin + length]) == checksum:
                lines[part][name] = line
            else:
                return None
            begin += length + 1
    return Snapshot(parts, lines) if begin == size else None


def _begin_of(path: Path) -> tuple[bytes, int]:
    """Return the first line of a file, and the size of the file."""
    with path.open("rb") as file:
        return file.readline(), os.fstat(file.fileno()).st_size


def _all_of(path: Path) -> tuple[bytes, int]:
    # A buffered file would hold the lines of a large run twice.
    text = path.read_bytes()
    return text, len(text)


def compact(value: Any) -> str:
    """Return a value as JSON in one line."""
    return json.dumps(value, separators=(",", ":"))


S = TypeVar("S")
RECENT = 64
"""Least number of newest events that an `OrderedFold` can fold again."""


class OrderedFold(Generic[S]):
    """State from folding events in order of time.

    Files are read one by one, and the clocks of nodes differ. When an event arrives that is older than one
    already folded, the newest events are folded again. The result always equals one pass in order.

    Parameters
    ----------
    start : S
        State before the first event; values of S are never changed in place.
    step : callable
        Function from a state and the next event to the next state.
    until : Order or None
        Position of the last event included in `start`; None: it includes none.
    """

    __slots__ = ("_events", "_middle", "_start", "_step", "_until", "state")

    def __init__(self, start: S, step: Callable[[S, Event], S], until: Order | None = None) -> None:
        self._start, self._step, self._until = start, step, until
        self._events: list[Event] = []
        self._middle: tuple[int, S] = 0, start
        """Number of events, and the state after them."""
        self.state = start

    @property
    def last(self) -> Order | None:
        """Position of the last event so far; None if there is none."""
        return self._events[-1].order if self._events else self._until

    def add(self, events: Iterable[Event]) -> None:
        """Fold more events, in any order.

        Raises
        ------
        StaleSnapshotError
            If an event belongs before the last one included in `start`, or before the newest `RECENT` ones.
        """
        new = in_order(events)
        if self._until is not None and new[0].order < self._until:
            raise StaleSnapshotError
        if self._events and new[0].order < self._events[-1].order:
            new, self._events = in_order([*self._events, *new]), []
            self.state, self._middle = self._start, (0, self._start)
        for begin in range(0, len(new), RECENT):
            self._fold(new[begin : begin + RECENT])

    def _fold(self, events: list[Event]) -> None:
        self._events += events
        self.state = functools.reduce(self._step, events, self.state)
        count, middle = self._middle
        if len(self._events) - count >= RECENT:
            # Events before the middle are dropped: enough newer ones can be folded again.
            self._until = self._events[count - 1].order if count else self._until
            self._start, self._events = middle, self._events[count:]
            self._middle = len(self._events), self.state

    def forget(self) -> None:
        """Drop all events; older ones are refused from now on."""
        self._until, self._events = self.last, []
        self._start, self._middle = self.state, (0, self.state)
