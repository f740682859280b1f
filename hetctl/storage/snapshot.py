"""Snapshot of a run's state in one file, from which readers of its events continue; only a cache.

Values are stored as rows, which are faster to read than mappings by name.
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
"""Key of the identity of the state; the state of another run or in another format is ignored."""


class StaleSnapshotError(Exception):
    """Snapshot that does not match the files: they are shorter, or have events that belong before its end."""


@functools.cache
def _values_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(field.name for field in dataclasses.fields(kind)))


def row_of(value: Any) -> Row:
    """Return the fields of a dataclass with several fields, in their order."""
    kind: Any = type(value)
    return list(_values_of(kind)(value))


def key_of(folder: RunFolder, *kinds: type) -> str:
    """Return the identity of a run's snapshot: the content of ``run.json``, and the format of the rows."""
    spec = folder.spec.read_bytes() if folder.spec.exists() else b""
    # Rows have no names: a version with other fields, or in another order, must not read them.
    columns = [[field.name for field in dataclasses.fields(kind)] for kind in kinds]
    return hashlib.sha256(spec + json.dumps(columns).encode()).hexdigest()


def write_snapshot(path: Path, key: str, value: dict[str, Any]) -> None:
    """Replace the snapshot of a run; OSError if the disk is full or read-only."""
    write_private(path, json.dumps({KEY: key, **value}, separators=(",", ":")) + "\n")


def read_snapshot(path: Path, key: str) -> dict[str, Any] | None:
    """Return the snapshot, or None if there is no valid one."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and value.get(KEY) == key else None
