"""Runs in a catalog, read without SQLAlchemy, whose import takes longer than many a command."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hetctl.model.job import Job
from hetctl.model.plan import Plan
from hetctl.model.run import RunSpec
from hetctl.model.serialization import decode
from hetctl.model.site import Site
from hetctl.model.values import dataclass

if TYPE_CHECKING:
    from hetctl.catalog.catalog import Catalog

T = TypeVar("T")
REVISION = "0010"
"""Newest migration; a test checks that it is."""
RUNS = "SELECT name, ensemble, site, created_at, state, reason FROM runs ORDER BY created_at, id"
COUNTER = slice(24, 28)
Stamp = tuple[bytes, int, int]

# Columns of this type are decoded where a connection asks for it.
sqlite3.register_converter("JSON", json.loads)


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
    return _read(
        path,
        lambda connection: [ListedRun(*row) for row in connection.execute(RUNS)],
        lambda catalog: catalog.listed_runs(),
    )


def stored_run(path: Path, name: str) -> tuple[RunRecord | None, list[Job]]:
    """Return a run, if there is one of that name, and its jobs, by number; errors as of `listed_runs`."""
    return _read(
        path,
        lambda connection: _stored_run(connection, name),
        lambda catalog: (catalog.run(name), catalog.jobs(name)),
    )


def _stored_run(connection: sqlite3.Connection, name: str) -> tuple[RunRecord | None, list[Job]]:
    connection.row_factory = sqlite3.Row
    connection.execute("BEGIN")
    row = connection.execute("SELECT * FROM runs WHERE name = ?", (name,)).fetchone()
    return decode(RunRecord, dict(row)) if row else None, _jobs_in(connection, name)


def stored_jobs(path: Path, name: str) -> tuple[Site, list[Job]]:
    """Return the site and the jobs of a run, by number, without its members; errors as of `listed_runs`."""
    return _read(
        path,
        lambda connection: _stored_jobs(connection, name),
        lambda catalog: (catalog.site_of(name), catalog.jobs(name)),
    )


def _stored_jobs(connection: sqlite3.Connection, name: str) -> tuple[Site, list[Job]]:
    connection.row_factory = sqlite3.Row
    connection.execute("BEGIN")
    ((spec,),) = connection.execute("SELECT spec FROM runs WHERE name = ?", (name,)).fetchall()
    return decode(Site, spec["site"]), _jobs_in(connection, name)


def _jobs_in(connection: sqlite3.Connection, name: str) -> list[Job]:
    jobs = connection.execute("SELECT * FROM jobs WHERE run = ? ORDER BY number", (name,)).fetchall()
    return [decode(Job, dict(job)) for job in jobs]


def _read(path: Path, directly: Callable[[sqlite3.Connection], T], otherwise: Callable[[Catalog], T]) -> T:
    """Read a catalog with the present schema directly, any other through SQLAlchemy."""
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, detect_types=sqlite3.PARSE_DECLTYPES)) as connection:
            if connection.execute("SELECT version_num FROM alembic_version").fetchone() == (REVISION,):
                return directly(connection)
    except sqlite3.Error:
        # The catalog says what is wrong, or finds nothing wrong by now.
        pass
    from hetctl.catalog.catalog import Catalog

    with Catalog.open_to_read(path) as catalog:
        return otherwise(catalog)


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
