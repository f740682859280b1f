"""Trials of a search in a job: files of parents are copied while the driver goes on."""

from __future__ import annotations

import errno
import threading

import pytest
from workbench import wait_for

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.events import DRIVER
from hetctl.model.run import RunSpec, Usage
from hetctl.model.searches import SearchSpec
from hetctl.model.serialization import encode
from hetctl.model.site import Queue, Site
from hetctl.model.training_progress import EpochResult, Progress
from hetctl.runtime.driver.trial_queue import TrialQueue
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.storage.event_files import EventQueue, EventWriter, read_events
from hetctl.storage.paths import RunFolder

NAMES = ("t0", "t1", "t2", "t3")
LOSSES = {"t0": 0.5, "t1": 2.0}


@pytest.fixture
def failures():
    return []


@pytest.fixture
def trials(tmp_path, failures):
    """The queue of a search with two trials, of which the worse one is to go on as a mutant of the other."""
    search = SearchSpec(
        *("pbt", NAMES, {"rate": {"uniform": [0.1, 1.0]}}, 2),
        {"trials": 2, "every": 1, "mutate": {"rate": {"multiply": [0.5, 2.0]}}},
    )
    members = tuple(Member(name, stop=StopRule("loss", max_epochs=2)) for name in NAMES)
    ensemble = Ensemble("e", "pytorch", Functions("m:i", "m:m"), members, "/x", search=search)
    site = Site("local", "local", "local", 1, 2, 2, 2**30, (Queue("local"),))
    spec = RunSpec("r", ensemble, site, "fluid", 2, "local", 3600, 60, (), str(tmp_path / "checkpoints"))
    run = RunFolder(tmp_path / "run").create()
    queue = EventQueue(run.events, pytest.fail)
    made = TrialQueue(run, spec, 2, lambda _: False, queue, failures.append)
    assert made.advance({}, Usage(0, 0.0), 0.0)
    results = {name: EpochResult(1, {"loss": loss}, 1.0, 1, 1.0) for name, loss in LOSSES.items()}
    for name, result in results.items():
        EventWriter(run.events, name, 0).write("epoch", **encode(result))
    progress = {name: Progress(name, (results[name],) if name in results else ()) for name in NAMES}
    return made, run, lambda: made.advance(progress, Usage(0, 0.0), 1.0)


def test_parents_files_are_copied_beside_the_driver(trials, failures, monkeypatch):
    queue, run, advance = trials
    enough, copied = threading.Event(), []
    monkeypatch.setattr(CheckpointFolder, "inherit", lambda *_: copied.append(enough.wait(60)))
    assert advance()
    (mutant,) = (e.data for e in read_events(run.events_of(DRIVER)) if e.kind == "trial" and e.data["parent"])
    assert queue.is_preparing
    assert [*read_events(run.events_of(mutant["member"]))] == []
    enough.set()
    wait_for(lambda: not queue.is_preparing)
    (epoch,) = read_events(run.events_of(mutant["member"]))
    assert queue.take_written().keys() == {mutant["member"]}
    assert (epoch.data["metrics"], copied, failures) == ({"loss": LOSSES["t0"]}, [True], [])


def test_a_copy_that_fails_ends_the_search(trials, failures, monkeypatch):
    queue, _, advance = trials

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CheckpointFolder, "inherit", full)
    advance()
    wait_for(lambda: not queue.is_preparing)
    assert [error.errno for error in failures] == [errno.ENOSPC]
    assert not advance()
