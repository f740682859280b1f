"""Visits of a run before a job of hops begins: what its events and its checkpoints have."""

from __future__ import annotations

import shutil
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

from hetctl.model.ensemble import Ensemble, Functions, Member, Partitions
from hetctl.model.run import RunSpec
from hetctl.model.site import Queue, Site
from hetctl.runtime.driver.hop_job import (
    HopJob,
    drop_leftovers,
    newest_states,
    next_number,
    recorded_visits,
)
from hetctl.runtime.driver.rounds import Rounds
from hetctl.runtime.worker.checkpoint import CheckpointFolder, TrainingState
from hetctl.storage.event_files import EventQueue, EventWriter, read_events
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import checkpoint_folder


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.events.mkdir(parents=True)
    return run


@pytest.fixture
def spec(tmp_path):
    members = (Member("a"), Member("b"))
    ensemble = Ensemble(
        "e", "pytorch", Functions("m:i", "m:m"), members, "/nowhere", partitions=Partitions(2)
    )
    site = Site("local", "local", "local", 1, 2, 2, 2**33, (Queue("local"),))
    return RunSpec("run", ensemble, site, "fluid", 1, "local", 600, 10, (), str(tmp_path / "checkpoints"))


VISIT = {"epoch": 1, "evaluates": False, "partition": 0, "worker": "n1:0", "began_at": 1.0, "ended_at": 2.0}
COSTS = {"waited_s": 0.0, "hop_s": 0.0, "bytes": 0, "samples": 10}


def record(folder, member, kind, **data):
    EventWriter(folder.events, member, 0).write(kind, **data)


def record_visits(folder, member, *numbers):
    for number in numbers:
        record(folder, member, "visit", number=number, **VISIT, **COSTS)


def save(spec, member, visit, samples):
    state = TrainingState(part_samples=samples, visited=tuple(range(visit)), visit=visit)
    return CheckpointFolder(checkpoint_folder(spec, member)).save({"w": np.zeros(2)}, state)


def rounds_of(folder, spec):
    """Return the rounds of a job of which only the files are real."""
    unused = {field.name: None for field in fields(Rounds) if field.init and not field.name.startswith("_")}
    rank_pool = SimpleNamespace(agents=SimpleNamespace(), note_written=lambda *_: None)
    real = {"folder": folder, "spec": spec, "rank_pool": rank_pool, "on_failure": pytest.fail}
    return Rounds(**unused | real | {"queue": EventQueue(folder.events, pytest.fail)})


def found(folder, spec):
    recorded = recorded_visits(events_in(folder))
    states = newest_states(spec, ["a", "b"], recorded)
    return {name: state.visit for name, state in states.items()}, next_number(spec, ["a", "b"], recorded)


def test_a_run_begins_with_fresh_networks(folder, spec):
    assert found(folder, spec) == ({"a": -1, "b": -1}, 0)


def test_members_continue_from_the_newest_checkpoints(folder, spec):
    record_visits(folder, "a", 1, 2)
    save(spec, "a", 1, 10)
    save(spec, "a", 2, 20)
    record(folder, "b", "visit_lost", number=5, **VISIT, reason="killed")
    assert found(folder, spec) == ({"a": 2, "b": -1}, 6)


def test_a_visit_that_no_event_has_is_repeated(folder, spec):
    """The rank saved it after its driver was killed; the first visit of a member may be such a one."""
    record_visits(folder, "a", 1)
    save(spec, "a", 1, 10)
    save(spec, "a", 4, 20)
    save(spec, "b", 3, 10)
    assert found(folder, spec) == ({"a": 1, "b": -1}, 5)


def test_a_visit_that_was_undone_is_repeated(folder, spec):
    record_visits(folder, "a", 1, 2)
    save(spec, "a", 1, 10)
    save(spec, "a", 2, 20)
    record(folder, "a", "visits_undone", numbers=[2], reason="lost")
    assert found(folder, spec) == ({"a": 1, "b": -1}, 3)


def test_visits_that_no_checkpoint_has_are_undone(folder, spec):
    record_visits(folder, "a", 1, 2, 3)
    save(spec, "a", 1, 10)
    recorded = recorded_visits(events_in(folder))
    job = HopJob(rounds_of(folder, spec))
    job.reconcile(newest_states(spec, ["a"], recorded), {"a": 0}, recorded)
    *_, undone = read_events(folder.events_of("a"))
    assert (undone.kind, undone.data["numbers"]) == ("visits_undone", [2, 3])
    assert recorded_visits(events_in(folder)).of("a") == {1}


def test_a_member_without_its_checkpoints_does_not_begin_anew(folder, spec):
    record_visits(folder, "a", 1, 2, 3)
    for visit in (1, 2):
        manifest = save(spec, "a", visit, 10 * visit)
        told = {"bytes": manifest.bytes, "sha256": manifest.sha256, "duration_s": 0.1}
        record(folder, "a", "checkpoint", epoch=0, part_samples=10 * visit, path=manifest.file, **told)
    shutil.rmtree(checkpoint_folder(spec, "a"))
    assert found(folder, spec)[0] == {"a": 3, "b": -1}
    recorded = recorded_visits(events_in(folder))
    job = HopJob(rounds_of(folder, spec))
    job.reconcile(newest_states(spec, ["a"], recorded), {"a": 0}, recorded)
    assert recorded_visits(events_in(folder)).of("a") == {1, 2, 3}


def test_a_saved_visit_that_was_undone_leaves_a_fresh_network(folder, spec):
    record_visits(folder, "a", 1)
    record(folder, "a", "visits_undone", numbers=[1], reason="lost")
    manifest = save(spec, "a", 1, 10)
    told = {"bytes": manifest.bytes, "sha256": manifest.sha256, "duration_s": 0.1}
    record(folder, "a", "checkpoint", epoch=0, part_samples=10, path=manifest.file, **told)
    assert found(folder, spec)[0] == {"a": -1, "b": -1}


def test_what_killed_ranks_left_is_deleted_when_hops_begin(spec):
    save(spec, "a", 1, 10)
    save(spec, "a", 2, 20)
    path = checkpoint_folder(spec, "a")
    kept = set(path.iterdir())
    older, newer = (path / f"epoch-00000-{samples:012d}-00000-{9:09d}.npz" for samples in (5, 30))
    for left in (older, newer):
        left.write_bytes(b"x")
    drop_leftovers(spec, ["a", "b"])
    assert set(path.iterdir()) == {*kept, newer}
