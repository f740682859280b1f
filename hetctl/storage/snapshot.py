"""Snapshot of a run's state in one file, from which folds of its events continue; only a cache.

Values are stored as rows, which are faster to read than mappings by name. The first line of the file has all
but one part, of which each member has a line of its own: `status` of a large run needs those of few members.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar
from zlib import crc32

from hetctl.model.events import Event, Order, in_order
from hetctl.storage.atomic_io import write_private
from hetctl.storage.paths import RunFolder

T = TypeVar("T")
Row = list[Any]
KEY = "of"
"""Key of the identity of the state; the state of another run or in another format is ignored."""
MEMBERS, CHECKSUM = "lines", "crc32"
"""Keys of the members that have lines, in their order, and of a checksum of these, which are read later."""


class StaleSnapshotError(Exception):
    """Snapshot that does not match the files: they are shorter, or have events that belong before its end."""


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


def key_of(folder: RunFolder, *kinds: type) -> str:
    """Return the identity of a run's snapshot: the content of ``run.json``, and the format of the rows."""
    spec = folder.spec.read_bytes() if folder.spec.exists() else b""
    # Rows have no names: a version with other fields, or in another order, must not read them.
    columns = [_names_of(kind) for kind in kinds]
    return hashlib.sha256(spec + json.dumps(columns).encode()).hexdigest()


@dataclass(frozen=True)
class Snapshot:
    """State of a run.

    Parameters
    ----------
    parts : mapping of str to Any
        Parts of the state by name, as JSON values.
    lines : mapping of str to str
        One more part: a line of JSON by member, without its end.
    """

    parts: Mapping[str, Any]
    lines: Mapping[str, str]


def write_snapshot(path: Path, key: str, snapshot: Snapshot) -> None:
    """Replace the snapshot of a run; OSError if the disk is full or read-only."""
    lines = "".join(f"{line}\n" for line in snapshot.lines.values())
    of_lines = {MEMBERS: list(snapshot.lines), CHECKSUM: crc32(lines.encode())}
    write_private(path, f"{compact({KEY: key, **of_lines, **snapshot.parts})}\n{lines}")


def read_snapshot(path: Path, key: str) -> Snapshot | None:
    """Return the snapshot, or None if there is no valid one."""
    try:
        first, _, lines = path.read_text(encoding="utf-8").partition("\n")
        parts = json.loads(first)
    except (OSError, ValueError):
        return None
    if not isinstance(parts, dict) or parts.get(KEY) != key or parts.get(CHECKSUM) != crc32(lines.encode()):
        return None
    return Snapshot(parts, dict(zip(parts[MEMBERS], lines.splitlines(), strict=True)))


def compact(value: Any) -> str:
    """Return a value as JSON in one line."""
    return json.dumps(value, separators=(",", ":"))


S = TypeVar("S")


class OrderedFold(Generic[S]):
    """State that results from folding events one after another in order of time.

    Files are read one by one, and the clocks of nodes differ: if an event is older than one that was folded
    before it, all events are folded again, so that the result always equals that of one pass in order.

    Parameters
    ----------
    start : S
        State before the first event; values of S are never changed in place.
    step : callable
        Function from a state and the next event to the next state.
    until : Order or None
        Position of the last event included in `start`; None: it includes none.
    """

    __slots__ = ("_events", "_start", "_step", "_until", "state")

    def __init__(self, start: S, step: Callable[[S, Event], S], until: Order | None = None) -> None:
        self._start, self._step, self._until = start, step, until
        self._events: list[Event] = []
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
            If an event belongs before the last one included in `start`.
        """
        new = in_order(events)
        if self._until is not None and new[0].order < self._until:
            raise StaleSnapshotError
        late = bool(self._events) and new[0].order < self._events[-1].order
        self._events = in_order([*self._events, *new]) if late else [*self._events, *new]
        todo, start = (self._events, self._start) if late else (new, self.state)
        self.state = functools.reduce(self._step, todo, start)
