"""SQLite file of the catalog: creation, migration, and translation of its errors."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import StaticPool

from hetctl.catalog.schema import ALEMBIC_VERSION, METADATA, PROJECT
from hetctl.catalog.stored_runs import REVISION
from hetctl.model.errors import BadInputError, DiskError, HetctlError, LockedError, is_transient
from hetctl.storage.atomic_io import draft, file_mode, json_text, make_private_folder
from hetctl.storage.paths import Home

LOGGER = logging.getLogger(__name__)
# SQLite retries for this long before it reports SQLITE_BUSY, "database is locked".
BUSY_TIMEOUT_S = 5.0
BACKUP_AFTER_S = 86_400.0
"""Age of the newest backup after which the next change begins with a check and another backup."""
KEPT_BACKUPS = 2
REBUILD = (
    "`hetctl catalog rebuild` makes it anew from the newest backup and the files of runs and profiling jobs,"
    " which have all that was measured and trained"
)


class UnusableCatalogError(BadInputError):
    """Catalog that is damaged, or missing although there are runs."""


# SQLite message -> class of error, text and hint. The first fragment found in the message counts.
TROUBLES: dict[str, tuple[type[HetctlError], str, str]] = {
    "locked": (
        LockedError,
        "is in use by another process",
        "wait for it to end and try again",
    ),
    "not a database": (UnusableCatalogError, "is not a SQLite database", REBUILD),
    "malformed": (UnusableCatalogError, "is damaged", REBUILD),
    "readonly": (
        BadInputError,
        "cannot be written: it or its folder is read-only",
        "make both writable, or set HETCTL_HOME to a folder that is",
    ),
    "unable to open": (
        BadInputError,
        "cannot be opened: it or its folder is not accessible",
        "check its permissions, or set HETCTL_HOME to a folder that is writable",
    ),
    "is full": (
        BadInputError,
        "cannot be written: the disk is full",
        "free some space and try again; nothing of this change was stored",
    ),
    "disk I/O": (
        DiskError,
        "cannot be read or written: disk error, or over quota",
        "try again; if that does not help, check the disk and your quota",
    ),
}


def open_database(path: Path) -> Engine:
    """Return an engine on the catalog at `path`, which is created or migrated as needed.

    Transactions are deferred, except with the execution option ``begin="BEGIN IMMEDIATE"``.

    Raises
    ------
    BadInputError
        If the file is not a catalog, has a newer schema, or cannot be written.
    LockedError
        If another process keeps it locked.
    """
    with translate_db_errors(path):
        _create_private(path)
        # A write-ahead log needs memory shared by all processes, which network file systems do not
        # offer (https://www.sqlite.org/wal.html).
        engine = _engine(URL.create("sqlite", database=str(path)), on_connect="PRAGMA journal_mode = DELETE")
        try:
            _migrate(engine, path)
        except BaseException:
            engine.dispose()
            raise
    return engine


def open_to_read(path: Path) -> Engine:
    """Return an engine on the catalog at `path` that cannot change the file.

    A catalog with an older schema, or one that a crash left within a transaction, is read from a copy in
    memory, in the state in which the next writer will find it.

    Raises
    ------
    BadInputError
        If the file is not a catalog, has a newer schema, or cannot be read.
    LockedError
        If another process keeps it locked.
    """
    with translate_db_errors(path):
        engine = _read_only(path)
        try:
            if _is_current(engine, path):
                return engine
        except DatabaseError as error:
            # SQLite would have to write to roll a transaction back.
            if "readonly" not in str(error.orig):
                engine.dispose()
                raise
        except BaseException:
            engine.dispose()
            raise
        engine.dispose()
        return _copied(path)


def _read_only(path: Path) -> Engine:
    # In a URI, ? and # would end the path (https://www.sqlite.org/uri.html).
    name = f"file:{quote(os.fspath(path))}"
    return _engine(URL.create("sqlite", database=name, query={"mode": "ro", "uri": "true"}))


def _copied(path: Path) -> Engine:
    """Return an engine on a copy in memory, rolled back and migrated."""
    memory = sqlite3.connect(":memory:", check_same_thread=False)
    with tempfile.TemporaryDirectory(prefix="hetctl-") as folder:
        copy = Path(folder) / path.name
        # With its journal, SQLite rolls the copy back as the next writer will the file.
        for file in (path, path.with_name(f"{path.name}-journal")):
            with suppress(FileNotFoundError):
                shutil.copyfile(file, copy.with_name(file.name))
        with closing(sqlite3.connect(copy)) as source:
            source.backup(memory)
    # A second connection to :memory: would see an empty database of its own.
    engine = _engine(URL.create("sqlite"), creator=lambda: memory, poolclass=StaticPool)
    _migrate(engine, path)
    return engine


def is_sound(path: Path) -> bool:
    """Return true for a catalog that passes SQLite's check; errors other than damage as in `open_to_read`."""
    try:
        engine = open_to_read(path)
        try:
            with translate_db_errors(path):
                _check(engine, path)
        finally:
            engine.dispose()
    except (UnusableCatalogError, DatabaseError):
        return False
    return True


def backups_of(path: Path) -> list[Path]:
    """Return the backups of a catalog, the newest first."""
    return sorted(Home(path.parent).backups.glob(f"{path.stem}-*{path.suffix}"), reverse=True)


def is_backup_due(path: Path) -> bool:
    """Return true if there is no backup of a catalog, or only old ones."""
    backups = backups_of(path)
    return not backups or not 0.0 <= time.time() - backups[0].stat().st_mtime < BACKUP_AFTER_S


def back_up(engine: Engine, path: Path) -> None:
    """Check a catalog, and copy it beside the earlier backups; remove the oldest of these.

    Raises
    ------
    UnusableCatalogError
        If the catalog is damaged.
    """
    with translate_db_errors(path):
        _check(engine, path)
    name = time.strftime(f"{path.stem}-%Y%m%dT%H%M%SZ{path.suffix}", time.gmtime())
    try:
        copy_database(engine, Home(path.parent).backups / name)
    except (OSError, sqlite3.Error) as error:
        # A nearly full disk must not stop a run.
        LOGGER.warning("no backup of the catalog was made: %s", error)
        return
    for old in backups_of(path)[KEPT_BACKUPS:]:
        old.unlink(missing_ok=True)


def copy_database(engine: Engine, target: Path) -> None:
    """Copy a catalog, by SQLite's own means, to a private file; OSError or sqlite3.Error if that fails."""
    with draft(target) as temporary:
        _create_private(temporary)
        with closing(sqlite3.connect(temporary)) as copy, closing(engine.raw_connection()) as source:
            source.driver_connection.backup(copy)  # type: ignore[union-attr]
        temporary.replace(target)


def _check(engine: Engine, path: Path) -> None:
    """Raise UnusableCatalogError for a damaged catalog (https://www.sqlite.org/pragma.html#pragma_quick_check)."""
    with engine.begin() as connection:
        found = str(connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one())
    if found != "ok":
        raise UnusableCatalogError(f"the catalog {path} is damaged: {found}", REBUILD)


@contextmanager
def translate_db_errors(path: Path) -> Iterator[None]:
    """Convert errors of SQLite and the file system to errors that a user can resolve."""
    try:
        yield
    except DatabaseError as error:
        _refuse_silent_disk(path)
        for fragment, (kind, text, hint) in TROUBLES.items():
            if fragment in str(error.orig):
                raise kind(f"the catalog {path} {text}", hint) from error
        raise
    except OSError as error:
        if is_transient(error):
            raise
        raise BadInputError(
            f"the catalog {path} cannot be opened: {error.strerror}",
            "set HETCTL_HOME to a folder that is writable",
        ) from error


def _refuse_silent_disk(path: Path) -> None:
    """Raise OSError if the catalog's disk does not answer: SQLite does not say why a read fails."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        if is_transient(error):
            raise


def _create_private(path: Path) -> None:
    """Create the file before SQLite does, which applies the umask; journals inherit its mode."""
    make_private_folder(path.parent)
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(descriptor, file_mode(path.parent))
        os.close(descriptor)


def _engine(url: URL, *, on_connect: str = "", **how: Any) -> Engine:
    # As in files, so that the same text is found to be the same.
    engine = create_engine(
        url,
        connect_args={"timeout": BUSY_TIMEOUT_S},
        json_serializer=partial(json_text, allow_nan=True),
        **how,
    )

    @event.listens_for(engine, "connect")
    def _connected(connection: sqlite3.Connection, _record: object) -> None:
        # Python's driver would begin only at the first write; `_begin` begins explicitly.
        connection.isolation_level = None
        connection.execute(on_connect)
        # Off by default, for each connection anew (https://www.sqlite.org/foreignkeys.html).
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))

    return engine


def _migrate(engine: Engine, path: Path) -> None:
    if _is_current(engine, path):
        return
    with engine.execution_options(begin="BEGIN IMMEDIATE").begin() as connection:
        # Another process may have been first.
        stored = _stored_revision(connection, path)
        if not stored:
            _create(connection)
        elif stored < REVISION:
            _upgrade(connection, path)


def _is_current(engine: Engine, path: Path) -> bool:
    """Return true for the current schema and false for an older one; raise BadInputError for a newer one."""
    with engine.begin() as connection:
        stored = _stored_revision(connection, path)
    if stored > REVISION:
        raise BadInputError(
            f"the catalog {path} was written by a newer hetctl "
            f"(schema {stored}; this one supports up to {REVISION})",
            "upgrade hetctl",
        )
    return stored == REVISION


def _stored_revision(connection: Connection, path: Path) -> str:
    """Return the schema revision of the file, empty for an empty file, without loading Alembic."""
    names = set(connection.exec_driver_sql("SELECT name FROM sqlite_master").scalars())
    if "alembic_version" in names:
        return str(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one())
    if names:
        raise BadInputError(
            f"{path} is a SQLite database, but not a catalog of hetctl",
            "move it away, or set HETCTL_HOME to another folder",
        )
    return ""


def _create(connection: Connection) -> None:
    """Create the tables in an empty file, as all migrations together would, but without loading Alembic."""
    METADATA.create_all(connection)
    connection.execute(PROJECT.insert(), {"identity": uuid.uuid4().hex})
    ALEMBIC_VERSION.create(connection)
    connection.execute(ALEMBIC_VERSION.insert(), {"version_num": REVISION})


def _upgrade(connection: Connection, path: Path) -> None:
    # Imported here since new catalogs and those that are up to date open without Alembic.
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    # Alembic reads its options through configparser, which takes a single % for the start of a reference.
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, REVISION)
    except CommandError as error:
        raise UnusableCatalogError(f"the catalog {path} has an unknown schema: {error}", REBUILD) from error
