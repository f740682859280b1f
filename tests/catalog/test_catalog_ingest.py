from __future__ import annotations

import contextlib
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.catalog.catalog import Catalog
from hetctl.core.codec import encode
from hetctl.core.ensemble import Ensemble, Functions, Member
from hetctl.core.errors import BadInputError
from hetctl.core.events import DRIVER, Event
from hetctl.core.job import Job, JobState
from hetctl.core.plan import Allocation, Placement, Plan
from hetctl.core.profile import EpochResult
from hetctl.core.progress import progress_of
from hetctl.core.run import RoundFile, RunSpec
from hetctl.core.site import Queue, Site

ENSEMBLE = Ensemble("e", "tensorflow", Functions("m:i", "m:m"), (Member("a"), Member("b")), "/project")
SITE = Site("local", "local", "local", 1, 2, 2, 2**33, (Queue("local"),))
SPEC = RunSpec("run", ENSEMBLE, SITE, "flotilla", 2, "local", 600, 10, (), "/checkpoints")
PLAN = Plan("flotilla", "makespan", 2, 2, 1.0, 1.0, 1.0, ())
JOB = Job(0, "hetctl-run-0-a", 0, "", JobState.SUBMITTING, 1, 600, 0.0)
HERE = (Placement("n0", (0,)),)
TABLES = ("events", "rounds", "allocations", "epochs", "checkpoints")


def round_file(index: int) -> RoundFile:
    allocations = tuple(Allocation(name, 1, "data-parallel", 5.0, HERE) for name in "ab")
    return RoundFile("run", index, 0, 999.0, ENSEMBLE, allocations, "/checkpoints")


def result(epoch: int, at: float) -> EpochResult:
    return EpochResult(epoch, {"loss": 1.0 / epoch, "val_accuracy": 0.5}, 2.5, 1, at)


def step(kind: str, at: float, seq: int, member: str, **data: Any) -> Event:
    return Event(DRIVER, seq, kind, at, {"member": member, **data})


def driver_events(start: float, index: int) -> list[Event]:
    head = {"index": index, "job": 0, "predicted_s": 40.0, "members": ["a", "b"]}
    where = {"gpus": 1, "placement": [{"node": "n0", "gpus": [0]}]}
    return [
        Event(DRIVER, 0, "round_started", start, head),
        step("step_started", start + 1, 1, "a", **where),
        step("step_started", start + 1, 2, "b", **where),
        step("step_ended", start + 30, 3, "a", exit_code=0, why="finished", cause=""),
        step("step_ended", start + 31, 4, "b", exit_code=137, why="killed", cause="killed by SIGKILL"),
        # The step is tried once more.
        step("step_started", start + 32, 5, "b", **where),
        step("step_ended", start + 35, 6, "b", exit_code=0, why="finished", cause=""),
        Event(DRIVER, 7, "round_ended", start + 36, {"ended_by": "alpha"}),
    ]


def member_events(name: str, start: float, epochs: range) -> list[Event]:
    events = [Event(name, 0, "started", start, {"gpus": 1}), Event(name, 1, "no-such-kind", start, {"x": 1})]
    for epoch in epochs:
        at = start + epoch
        saved = {
            "epoch": epoch,
            "part_samples": 0,
            "path": f"/c/{epoch}",
            "bytes": 9,
            "sha256": "0",
            "seconds": 1,
        }
        events.append(Event(name, len(events), "checkpoint", at, saved))
        events.append(Event(name, len(events), "epoch", at, encode(result(epoch, at))))
    return events


# Round 1 reports epoch 3 of `a` again, and epoch 1 of `b` on a clock that is behind.
ROUNDS = [
    [
        *driver_events(100.0, 0),
        *member_events("a", 101.0, range(1, 4)),
        *member_events("b", 101.0, range(1, 3)),
    ],
    [
        *driver_events(200.0, 1),
        *member_events("a", 201.0, range(3, 6)),
        *member_events("b", 50.0, range(1, 4)),
    ],
]
ALL = [(index, event) for index, events in enumerate(ROUNDS) for event in events]


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
        for index, events in enumerate(ROUNDS):
            catalog.ingest("run", index, round_file(index), events)
        return tables(path)


EXPECTED = told_at_once()


def test_a_round_fills_every_table() -> None:
    with new_catalog() as (catalog, path):
        assert catalog.ingest("run", 0, round_file(0), ROUNDS[0]) == len(ROUNDS[0])
        assert catalog.events_seen("run") == len(ROUNDS[0])
        assert catalog.epochs("run") == {
            "a": tuple(result(epoch, 101.0 + epoch) for epoch in (1, 2, 3)),
            "b": tuple(result(epoch, 101.0 + epoch) for epoch in (1, 2)),
        }
        found = rows(path, "SELECT job, predicted_s, started_at, ended_at, ended_by FROM rounds")
        assert found == [(0, 40.0, 100.0, 136.0, "alpha")]
        found = rows(
            path,
            "SELECT member, gpus, mode, rate, placement, started_at, ended_at, exit_code, cause"
            " FROM allocations ORDER BY member",
        )
        place = '[{"node": "n0", "gpus": [0]}]'
        assert found == [
            ("a", 1, "data-parallel", 5.0, place, 101.0, 130.0, 0, ""),
            ("b", 1, "data-parallel", 5.0, place, 132.0, 135.0, 0, ""),
        ]
        found = rows(path, "SELECT epoch, path, bytes, saved_at FROM checkpoints WHERE member = 'b'")
        assert found == [(1, "/c/1", 9, 102.0), (2, "/c/2", 9, 103.0)]


def test_the_same_events_twice_change_nothing() -> None:
    with new_catalog() as (catalog, path):
        for index in (0, 1, 0, 1):
            new = catalog.ingest("run", index, round_file(index), ROUNDS[index])
        assert new == 0
        assert tables(path) == EXPECTED
        before = path.read_bytes()
        assert catalog.ingest("run", 1, round_file(1), [*ROUNDS[1], *ROUNDS[1]]) == 0
        assert path.read_bytes() == before


def test_an_event_told_twice_in_one_call_is_one_event() -> None:
    with new_catalog() as (catalog, _):
        assert catalog.ingest("run", 0, None, [ROUNDS[0][0], ROUNDS[0][0]]) == 1


def test_a_step_that_is_tried_again_is_open_until_it_ends() -> None:
    with new_catalog() as (catalog, path):
        catalog.ingest("run", 0, None, driver_events(0.0, 0)[:6])
        found = rows(
            path, "SELECT started_at, ended_at, exit_code, cause FROM allocations WHERE member = 'b'"
        )
        assert found == [(32.0, None, None, None)]


def test_a_round_is_known_before_its_first_event() -> None:
    with new_catalog() as (catalog, path):
        assert catalog.ingest("run", 0, round_file(0), []) == 0
        assert rows(path, "SELECT job, started_at FROM rounds") == [(0, None)]
        assert rows(path, "SELECT member, gpus, started_at FROM allocations") == [
            ("a", 1, None),
            ("b", 1, None),
        ]


def test_a_garbled_epoch_is_refused_whole() -> None:
    garbled = Event("a", 6, "epoch", 1.0, {"epoch": "one"})
    with new_catalog() as (catalog, path):
        before = tables(path)
        with pytest.raises(BadInputError, match="line 7 of the events of 'a' is not an epoch"):
            catalog.ingest("run", 0, None, [*ROUNDS[0], garbled])
        assert tables(path) == before


def test_epochs_agree_with_the_progress_folded_from_the_same_events() -> None:
    with new_catalog() as (catalog, _):
        for index in (1, 0):
            catalog.ingest("run", index, None, ROUNDS[index])
        events = sorted((event for _, event in ALL), key=lambda event: (event.time, event.source, event.seq))
        progress = progress_of(ENSEMBLE, events, 2)
        assert catalog.epochs("run") == {name: progress[name].epochs for name in "ab"}


@st.composite
def batches(draw: st.DrawFn) -> list[list[tuple[int, Event]]]:
    """Every event at least once, some again, in any order and cut anywhere."""
    told = draw(st.permutations(ALL)) + draw(st.lists(st.sampled_from(ALL), max_size=20))
    cuts = sorted(draw(st.lists(st.integers(0, len(told)), max_size=5)))
    return [told[start:end] for start, end in zip([0, *cuts], [*cuts, len(told)], strict=True)]


@settings(max_examples=30, deadline=None)
@given(parts=batches(), with_file=st.lists(st.booleans(), min_size=6, max_size=6))
def test_the_tables_depend_on_the_events_alone(
    parts: list[list[tuple[int, Event]]], with_file: list[bool]
) -> None:
    with new_catalog() as (catalog, path):
        new = 0
        for part, seen in zip(parts, with_file, strict=False):
            for index in (0, 1):
                events = [event for where, event in part if where == index]
                new += catalog.ingest("run", index, round_file(index) if seen else None, events)
        for index in (0, 1):
            assert catalog.ingest("run", index, round_file(index), []) == 0
        assert new == len(ALL)
        assert tables(path) == EXPECTED


def test_statements_do_not_grow_with_the_events() -> None:
    """A query per event would take thousands of statements and seconds on a shared file system."""
    many = [event for n in range(200) for event in member_events(f"m{n}", 0.0, range(1, 13))]
    with new_catalog() as (catalog, _):
        statements: list[str] = []
        with catalog._reader.connect() as connection:
            connection.connection.dbapi_connection.set_trace_callback(statements.append)
        started = time.perf_counter()
        assert catalog.ingest("run", 0, None, many) == len(many) == 5200
        assert time.perf_counter() - started < 5.0
        # Each row of a bulk insert is traced on its own.
        assert sum(not text.startswith("INSERT") for text in statements) < 12
