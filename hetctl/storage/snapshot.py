"""A run's state in one file, from which readers of its events go on: a cache, and never more than that.

Values lie in it as rows, which are quicker to read than mappings by name.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from hetctl.storage.atomic_io import write_private
from hetctl.storage.paths import RunFolder

Row = list[Any]
KEY = "of"
"""Says what the state is of: one of another run, or in another form, is no state."""


class StaleSnapshotError(Exception):
    """The files are not those that the snapshot was made of, or say what ought to have come before it."""


@functools.cache
def _values_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(field.name for field in dataclasses.fields(kind)))


def row_of(value: Any) -> Row:
    """Return the fields of a dataclass with several in their order."""
    kind: Any = type(value)
    return list(_values_of(kind)(value))


def key_of(folder: RunFolder, *kinds: type) -> str:
    """Return what a snapshot of a run is known by: ``run.json`` as it is, and the form of its rows."""
    spec = folder.spec.read_bytes() if folder.spec.exists() else b""
    columns = [[field.name for field in dataclasses.fields(kind)] for kind in kinds]
    return hashlib.sha256(spec + json.dumps(columns).encode()).hexdigest()


def write_snapshot(path: Path, key: str, value: dict[str, Any]) -> None:
    """Replace the snapshot of a run; OSError if the disk is full or read-only."""
    write_private(path, json.dumps({KEY: key, **value}, separators=(",", ":")) + "\n")


def read_snapshot(path: Path, key: str) -> dict[str, Any] | None:
    """Return the snapshot, or None if there is none that can be used."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and value.get(KEY) == key else None
