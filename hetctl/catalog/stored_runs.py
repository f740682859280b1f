"""Runs in a catalog, read without SQLAlchemy, whose import takes longer than many a command."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from hetctl.model.job import Job
from hetctl.model.plan import Plan
from hetctl.model.run import RunSpec
from hetctl.model.serialization import decode
from hetctl.model.site import Site
from hetctl.model.values import dataclass

T = TypeVar("T")
REVISION = "0010"
"""Newest migration; a test checks that it is."""
RUNS = "SELECT name, ensemble, site, created_at, state, reason FROM runs ORDER BY created_at, id"
COUNTER = slice(24, 28)
Stamp = tuple[bytes, int, int]

Rows = Callable[..., list[dict[str, Any]]]
"""Function that returns the rows of a query with these values."""
JSON = frozenset({"spec", "plan", "failed_nodes"})
"""Columns with JSON."""


@dataclass(frozen=True)
class ListedRun:
    """Run in a list of all."""

    name: str
    ensemble: str
    site: str
    created_at: float
    state: str
    reason: str


@dataclass(frozen=True)
class RunRecord:
    """Run as stored in the catalog.

    Parameters
    ----------
    plan : Plan
        Plan that was submitted, without its rounds.
    created_at : float
        Creation time in seconds since the epoch.
    state, reason : str
        Same as in `hetctl.model.run_status.RunStatus`.
    """

    spec: RunSpec
    plan: Plan
    created_at: float
    state: str
    reason: str


def listed_runs(path: Path) -> list[ListedRun]:
    """Return all runs without their specifications, which may be large, the oldest first.

    Raises
    ------
    BadInputError, LockedError
        As of `Catalog.open_to_read`.
    """
    return _read(path, lambda rows: [ListedRun(**row) for row in rows(RUNS)])


def stored_run(path: Path, name: str) -> tuple[RunRecord | None, list[Job]]:
    """Return a run, if there is one of that name, and its jobs, by number; errors as of `listed_runs`."""

    def found(rows: Rows) -> tuple[RunRecord | None, list[Job]]:
        runs = [decode(RunRecord, row) for row in rows("SELECT * FROM runs WHERE name = ?", name)]
        return runs[0] if runs else None, _jobs_of(rows, name)

    return _read(path, found)


def stored_jobs(path: Path, name: str) -> tuple[Site, list[Job]]:
    """Return the site and the jobs of a run, by number, without its members; errors as of `listed_runs`."""

    def found(rows: Rows) -> tuple[Site, list[Job]]:
        (run,) = rows("SELECT spec FROM runs WHERE name = ?", name)
        return decode(Site, run["spec"]["site"]), _jobs_of(rows, name)

    return _read(path, found)


def _jobs_of(rows: Rows, name: str) -> list[Job]:
    return [decode(Job, row) for row in rows("SELECT * FROM jobs WHERE run = ? ORDER BY number", name)]


def _read(path: Path, of: Callable[[Rows], T]) -> T:
    """Read a catalog with the present schema directly, any other through SQLAlchemy."""
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute("BEGIN")
            found = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            if tuple(found or ()) == (REVISION,):
                return of(lambda query, *named: _decoded(connection.execute(query, named)))
    except sqlite3.Error:
        # The catalog says what is wrong, or finds nothing wrong by now.
        pass
    from hetctl.catalog.database import open_to_read, translate_db_errors

    engine = open_to_read(path)
    try:
        with translate_db_errors(path), engine.begin() as transaction:
            return of(lambda query, *named: _decoded(transaction.exec_driver_sql(query, named).mappings()))
    finally:
        engine.dispose()


def _decoded(rows: Iterable[Any]) -> list[dict[str, Any]]:
    named = (dict(row).items() for row in rows)
    return [{name: json.loads(value) if name in JSON else value for name, value in row} for row in named]


def stamp_of(path: Path) -> Stamp | None:
    """Return a stamp that differs after every change of the catalog; None if the file cannot be read.

    SQLite counts transactions in bytes 24 to 27 of the file ("The Database File Format", 1.3.3). Time and
    size distinguish a transaction that was rolled back from the next one.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            return file.read(COUNTER.stop)[COUNTER], found.st_mtime_ns, found.st_size
    except OSError:
        return None
