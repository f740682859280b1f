from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import event

import hetctl.catalog
from hetctl.catalog import database
from hetctl.catalog.catalog import Catalog
from hetctl.catalog.database import BACKUP_AFTER_S, KEPT_BACKUPS, UnusableCatalogError, backups_of, is_sound
from hetctl.catalog.stored_runs import REVISION
from hetctl.model.errors import BadInputError, LockedError
from hetctl.model.profile import PreprocessPoint


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "catalog.db"


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def sql(path: Path, text: str) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        with connection:
            return connection.execute(text).fetchall()
    finally:
        connection.close()


def save_something(catalog: Catalog) -> None:
    catalog.save_points("digits", "local", [PreprocessPoint(1, 2.0)])


def test_the_revision_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(hetctl.catalog.__file__).parent / "migrations"))
    assert ScriptDirectory.from_config(config).get_heads() == [REVISION]


def test_a_new_or_up_to_date_catalog_opens_without_alembic(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_upgrade", lambda *_: pytest.fail("migrated"))
    Catalog.open(path).close()
    before = path.read_bytes()
    Catalog.open(path).close()
    assert path.read_bytes() == before


def test_an_empty_file_becomes_a_catalog(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    with Catalog.open(path) as catalog:
        assert catalog.runs() == []


def test_an_interrupted_migration_is_undone_and_can_be_repeated(path: Path) -> None:
    def break_off(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "CREATE TABLE jobs" in statement:
            raise KeyboardInterrupt

    event.listen(sqlalchemy.Engine, "before_cursor_execute", break_off)
    try:
        with pytest.raises(KeyboardInterrupt):
            Catalog.open(path)
    finally:
        event.remove(sqlalchemy.Engine, "before_cursor_execute", break_off)
    assert sql(path, "SELECT name FROM sqlite_master") == []
    with Catalog.open(path) as catalog:
        assert catalog.runs() == []


def test_a_newer_schema_is_refused_and_left_alone(path: Path) -> None:
    Catalog.open(path).close()
    sql(path, "UPDATE alembic_version SET version_num = '0099'")
    before = path.read_bytes()
    with pytest.raises(BadInputError) as caught:
        Catalog.open(path)
    assert f"newer hetctl (schema 0099; this one supports up to {REVISION})" in caught.value.message
    assert caught.value.hint == "upgrade hetctl"
    assert path.read_bytes() == before


def test_a_schema_before_the_first_release_is_refused_and_left_alone(path: Path) -> None:
    Catalog.open(path).close()
    sql(path, "UPDATE alembic_version SET version_num = '0009'")
    before = path.read_bytes()
    for opened in (Catalog.open, Catalog.open_to_read):
        with pytest.raises(UnusableCatalogError, match=r"unknown schema.*0009") as caught:
            opened(path)
        assert "hetctl catalog rebuild" in caught.value.hint
    assert path.read_bytes() == before


def test_somebody_elses_database_is_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    sql(path, "CREATE TABLE recipes (name TEXT)")
    before = path.read_bytes()
    with pytest.raises(BadInputError, match="not a catalog of hetctl"):
        Catalog.open(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("name: digits\n" * 100)
    with pytest.raises(BadInputError, match="is not a SQLite database"):
        Catalog.open(path)


def test_a_damaged_catalog_is_refused(path: Path) -> None:
    Catalog.open(path).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:1024] + b"\xff" * (len(whole) - 1024))
    with pytest.raises(BadInputError, match="is damaged"):
        Catalog.open(path)


def test_a_folder_in_the_place_of_the_catalog_is_refused(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(BadInputError, match="cannot be opened"):
        Catalog.open(path)


def test_a_home_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match="cannot be opened: Not a directory"):
        Catalog.open(tmp_path / "file" / "home" / "catalog.db")


def test_a_catalog_cannot_be_made_in_a_read_only_folder(
    folder: Path, make_read_only: Callable[[], None]
) -> None:
    make_read_only()
    for path in (folder / "catalog.db", folder / "home" / "catalog.db"):
        with pytest.raises(BadInputError, match="cannot be opened: Permission denied"):
            Catalog.open(path)


def test_a_read_only_catalog_can_be_read(folder: Path, make_read_only: Callable[[], None]) -> None:
    with Catalog.open(folder / "catalog.db") as catalog:
        save_something(catalog)
    make_read_only()
    with Catalog.open(folder / "catalog.db") as catalog:
        assert catalog.preprocess("digits", "local") == [PreprocessPoint(1, 2.0)]
        with pytest.raises(BadInputError, match="is read-only"):
            save_something(catalog)


def test_a_full_disk_stores_nothing(path: Path) -> None:
    many = [PreprocessPoint(cores, 1.0) for cores in range(1, 5000)]
    with Catalog.open(path) as catalog:
        save_something(catalog)
        with catalog._reader.connect() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 1")
        with pytest.raises(BadInputError, match="the disk is full"):
            catalog.save_points("digits", "local", many)
        assert catalog.preprocess("digits", "local") == [PreprocessPoint(1, 2.0)]


def test_a_busy_catalog_is_locked(path: Path) -> None:
    with Catalog.open(path) as catalog:
        with catalog._reader.connect() as connection:
            connection.exec_driver_sql("PRAGMA busy_timeout = 50")  # in milliseconds
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LockedError, match="in use by another process"):
            save_something(catalog)
        assert catalog.preprocess("digits", "local") == []
        other.execute("ROLLBACK")
        other.close()
        save_something(catalog)
        assert catalog.preprocess("digits", "local") == [PreprocessPoint(1, 2.0)]


@pytest.mark.usefixtures("no_umask")
def test_only_the_owner_can_read_the_catalog_and_its_journal(path: Path) -> None:
    with Catalog.open(path) as catalog:
        with catalog._write() as connection:
            connection.exec_driver_sql("INSERT INTO preprocess_points VALUES ('e', 's', 1, 2.0)")
            assert mode(path.with_name("catalog.db-journal")) == 0o600
        assert mode(path) == 0o600
        assert mode(path.parent) == 0o700
        assert sorted(file.name for file in path.parent.iterdir()) == ["catalog.db"]


def test_the_journal_is_deleted_and_foreign_keys_hold(path: Path) -> None:
    Catalog.open(path).close()
    assert sql(path, "PRAGMA journal_mode") == [("delete",)]
    sql(path, "PRAGMA journal_mode = WAL")
    with Catalog.open(path) as catalog:
        with catalog._reader.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete"
        save_something(catalog)
    assert sql(path, "PRAGMA journal_mode") == [("delete",)]


def test_a_catalog_that_is_opened_to_read_cannot_be_changed(path: Path) -> None:
    with Catalog.open(path) as catalog:
        save_something(catalog)
    before = path.read_bytes()
    with Catalog.open_to_read(path) as catalog:
        assert catalog.preprocess("digits", "local") == [PreprocessPoint(1, 2.0)]
        with pytest.raises(BadInputError, match="cannot be written"):
            save_something(catalog)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_reading_makes_no_catalog(path: Path) -> None:
    path.parent.mkdir()
    with pytest.raises(BadInputError, match="cannot be opened"):
        Catalog.open_to_read(path)
    assert list(path.parent.iterdir()) == []


def test_an_empty_catalog_is_read_migrated_but_not_changed(path: Path) -> None:
    """It is that of a file which a killed process has only just made."""
    path.parent.mkdir()
    path.touch()
    with Catalog.open_to_read(path) as catalog:
        assert catalog.runs() == []
    assert path.read_bytes() == b""


def test_a_newer_catalog_cannot_be_read(path: Path) -> None:
    Catalog.open(path).close()
    sql(path, "UPDATE alembic_version SET version_num = '0099'")
    with pytest.raises(BadInputError, match="newer hetctl"):
        Catalog.open_to_read(path)


CRASH = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
connection.execute("CREATE TABLE half (text)")
connection.executemany("INSERT INTO half VALUES (?)", [("x" * 4000,)] * 500)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_reader_ignores_a_change_that_a_crash_interrupted(path: Path) -> None:
    """SQLite would have to write, which it may not: it calls the database read-only."""
    with Catalog.open(path) as catalog:
        save_something(catalog)
    subprocess.run([sys.executable, "-c", CRASH, str(path)], check=False)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert set(before) == {"catalog.db", "catalog.db-journal"}
    with Catalog.open_to_read(path) as catalog:
        assert catalog.preprocess("digits", "local") == [PreprocessPoint(1, 2.0)]
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    with Catalog.open(path) as catalog:
        assert catalog.preprocess("digits", "local") == [PreprocessPoint(1, 2.0)]
    assert "half" not in str(sql(path, "SELECT name FROM sqlite_master"))


@pytest.mark.usefixtures("no_umask")
def test_the_first_change_of_a_day_makes_a_private_backup(path: Path) -> None:
    with Catalog.open(path) as catalog:
        save_something(catalog)
    assert backups_of(path) == []
    for age_s in (1.5, 1.2, 0.0):
        for backup in backups_of(path):
            os.utime(backup, times=(time.time() - age_s * BACKUP_AFTER_S,) * 2)
            backup.rename(backup.with_stem(f"{backup.stem[:-1]}{age_s}"))
        with Catalog.open(path) as catalog:
            save_something(catalog)
            save_something(catalog)
    assert len(backups_of(path)) == KEPT_BACKUPS
    for backup in backups_of(path):
        assert is_sound(backup)
        assert (mode(backup), mode(backup.parent)) == (0o600, 0o700)
        with Catalog.open_to_read(backup) as catalog:
            assert catalog.preprocess("digits", "local") == [PreprocessPoint(1, 2.0)]


def test_a_damaged_catalog_is_found_before_it_is_changed(path: Path) -> None:
    with Catalog.open(path) as catalog:
        for ensemble in range(300):
            catalog.save_points(f"digits-{ensemble}", "local", [PreprocessPoint(1, 2.0)])
    with path.open("r+b") as file:
        file.seek(-2048, os.SEEK_END)
        file.write(b"x" * 2048)
    before = path.read_bytes()
    with Catalog.open(path) as catalog, pytest.raises(UnusableCatalogError) as refused:
        save_something(catalog)
    assert "hetctl catalog rebuild" in refused.value.hint
    assert (path.read_bytes(), backups_of(path)) == (before, [])
