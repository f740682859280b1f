"""List of the runs in a catalog, read without SQLAlchemy, whose import takes longer than many a command."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

RUNS = "SELECT name, ensemble, site, created_at, state FROM runs ORDER BY created_at, id"


@dataclass(frozen=True)
class ListedRun:
    """Run in a list of all."""

    name: str
    ensemble: str
    site: str
    created_at: float
    state: str


def listed_runs(path: Path) -> list[ListedRun]:
    """Return all runs without their specifications, which may be large, the oldest first.

    Raises
    ------
    BadInputError, LockedError
        As of `Catalog.open_to_read`.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            return [ListedRun(*row) for row in connection.execute(RUNS)]
    except sqlite3.Error:
        # It says what is wrong, or finds nothing wrong by now.
        from hetctl.catalog.catalog import Catalog

        with Catalog.open_to_read(path) as catalog:
            return catalog.listed_runs()
