from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_folds import progress_of

from hetctl.catalog.catalog import Catalog
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.errors import BadInputError
from hetctl.model.events import DRIVER, Event
from hetctl.model.job import Job, JobState
from hetctl.model.plan import Plan
from hetctl.model.run import RunSpec
from hetctl.model.serialization import encode
from hetctl.model.site import Queue, Site
from hetctl.model.training_progress import EpochResult

ENSEMBLE = Ensemble("e", "tensorflow", Functions("m:i", "m:m"), (Member("a"), Member("b")), "/project")
SITE = Site("local", "local", "local", 1, 2, 2, 2**33, (Queue("local"),))
SPEC = RunSpec("run", ENSEMBLE, SITE, "flotilla", 2, "local", 600, 10, (), "/checkpoints")
PLAN = Plan("flotilla", "makespan", 2, 2, 1.0, 1.0, 1.0, ())
JOB = Job(0, "hetctl-run-0-a", "", JobState.SUBMITTING, 1, 600, 0.0)
TABLES = ("events", "epochs")


def result(epoch: int, at: float) -> EpochResult:
    return EpochResult(epoch, {"loss": 1.0 / epoch, "val_accuracy": 0.5}, 2.5, 1, at)


def driver_events(start: float, index: int) -> list[Event]:
    where = {"gpus": 1, "mode": "data-parallel", "rate": 5.0, "placement": [{"node": "n0", "gpus": [0]}]}
    told = [
        ("round_started", 0, {"job": 0, "predicted_s": 40.0, "members": ["a", "b"]}),
        ("task_started", 1, {"member": "a", **where}),
        ("task_started", 1, {"member": "b", **where}),
        ("task_ended", 30, {"member": "a", "exit_code": 0, "reason": "finished", "description": ""}),
        (
            "task_ended",
            31,
            {"member": "b", "exit_code": 137, "reason": "killed", "description": "killed by SIGKILL"},
        ),
        # The step is tried once more.
        ("task_started", 32, {"member": "b", **where}),
        ("task_ended", 35, {"member": "b", "exit_code": 0, "reason": "finished", "description": ""}),
        ("round_ended", 36, {"ended_by": "alpha"}),
    ]
    first = index * len(told)
    return [
        Event(DRIVER, seq, kind, start + at, data, index) for seq, (kind, at, data) in enumerate(told, first)
    ]


def member_events(name: str, start: float, epochs: range, index: int = 0, first: int = 0) -> list[Event]:
    told: list[tuple[str, float, dict[str, Any]]] = [
        ("started", start, {"epochs": epochs[0] - 1, "part_samples": 0}),
        ("no-such-kind", start, {"x": 1}),
    ]
    for epoch in epochs:
        at = start + epoch
        saved = {
            "epoch": epoch,
            "part_samples": 0,
            "path": f"/c/{epoch}",
            "bytes": 9,
            "sha256": "0",
            "duration_s": 1,
        }
        told += [("checkpoint", at, saved), ("epoch", at, encode(result(epoch, at)))]
    return [Event(name, seq, kind, at, data, index) for seq, (kind, at, data) in enumerate(told, first)]


# Round 1 reports epoch 3 of `a` again, and epoch 1 of `b` on a clock that is behind.
ROUNDS = [
    [
        *driver_events(100.0, 0),
        *member_events("a", 101.0, range(1, 4)),
        *member_events("b", 101.0, range(1, 3)),
    ],
    [
        *driver_events(200.0, 1),
        *member_events("a", 201.0, range(3, 6), 1, 8),
        *member_events("b", 50.0, range(1, 4), 1, 6),
    ],
]
ALL = [event for events in ROUNDS for event in events]


@contextlib.contextmanager
def new_catalog() -> Iterator[tuple[Catalog, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "catalog.db"
        with Catalog.open(path) as catalog:
            catalog.add_run(SPEC, PLAN, 1.0, JOB)
            yield catalog, path


def tables(path: Path) -> dict[str, list[Any]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return {
            name: sorted(connection.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in TABLES
        }


def rows(path: Path, text: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(text).fetchall()


def told_at_once() -> dict[str, list[Any]]:
    with new_catalog() as (catalog, path):
        catalog.ingest("run", ALL)
        return tables(path)


EXPECTED = told_at_once()


def test_a_round_fills_both_tables() -> None:
    with new_catalog() as (catalog, path):
        assert catalog.ingest("run", ROUNDS[0]) == len(ROUNDS[0])
        assert rows(path, "SELECT count(*) FROM events") == [(len(ROUNDS[0]),)]
        assert catalog.epochs("run") == {
            "a": tuple(result(epoch, 101.0 + epoch) for epoch in (1, 2, 3)),
            "b": tuple(result(epoch, 101.0 + epoch) for epoch in (1, 2)),
        }


def test_the_same_events_twice_change_nothing() -> None:
    with new_catalog() as (catalog, path):
        for index in (0, 1, 0, 1):
            new = catalog.ingest("run", ROUNDS[index])
        assert new == 0
        assert tables(path) == EXPECTED
        before = path.read_bytes()
        assert catalog.ingest("run", [*ROUNDS[1], *ROUNDS[1]]) == 0
        assert path.read_bytes() == before


def test_an_event_told_twice_in_one_call_is_one_event() -> None:
    with new_catalog() as (catalog, _):
        assert catalog.ingest("run", [ROUNDS[0][0], ROUNDS[0][0]]) == 1


def test_a_garbled_epoch_is_refused_whole() -> None:
    garbled = Event("a", 20, "epoch", 1.0, {"epoch": "one"})
    with new_catalog() as (catalog, path):
        before = tables(path)
        with pytest.raises(BadInputError, match="line 21 of the events of 'a' is not an epoch"):
            catalog.ingest("run", [*ROUNDS[0], garbled])
        assert tables(path) == before


def test_epochs_equal_the_progress_folded_from_the_same_events() -> None:
    with new_catalog() as (catalog, _):
        for index in (1, 0):
            catalog.ingest("run", ROUNDS[index])
        events = sorted(ALL, key=lambda event: (event.time, event.source, event.seq))
        progress = progress_of(ENSEMBLE, events, 2)
        assert catalog.epochs("run") == {name: progress[name].epochs for name in "ab"}


@st.composite
def batches(draw: st.DrawFn) -> list[list[Event]]:
    """Every event at least once, some again, in any order and cut anywhere."""
    told = draw(st.permutations(ALL)) + draw(st.lists(st.sampled_from(ALL), max_size=20))
    cuts = sorted(draw(st.lists(st.integers(0, len(told)), max_size=5)))
    return [told[start:end] for start, end in zip([0, *cuts], [*cuts, len(told)], strict=True)]


@settings(max_examples=30, deadline=None)
@given(parts=batches())
def test_the_tables_depend_on_the_events_alone(parts: list[list[Event]]) -> None:
    with new_catalog() as (catalog, path):
        assert sum(catalog.ingest("run", part) for part in parts) == len(ALL)
        assert tables(path) == EXPECTED


def test_statements_do_not_grow_with_the_events() -> None:
    """A query per event would take seconds on a shared file system."""
    many = [event for n in range(200) for event in member_events(f"m{n}", 0.0, range(1, 13))]
    with new_catalog() as (catalog, _):
        statements: list[str] = []
        with catalog._reader.connect() as connection:
            connection.connection.dbapi_connection.set_trace_callback(statements.append)
        assert catalog.ingest("run", many) == len(many) == 5200
        # Each row of a bulk insert is traced on its own.
        assert sum(not text.startswith("INSERT") for text in statements) < 12
