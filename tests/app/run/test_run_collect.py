"""Events are collected once, in portions, and only from files that have grown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetctl.app.run import collect as module
from hetctl.app.run.collect import collect
from hetctl.catalog.catalog import Catalog
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.events import DRIVER
from hetctl.model.job import Job, JobState
from hetctl.model.plan import Plan
from hetctl.model.run import RunSpec
from hetctl.model.site import Site
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import Home

ENSEMBLE = Ensemble("e", "pytorch", Functions("m:i", "m:m"), (Member("a"), Member("b")), "/project")
SITE = Site("local", "local", "local", 1, 2, 2, 2**33, ())
SPEC = RunSpec("run", ENSEMBLE, SITE, "fluid", 2, "local", 600, 10, (), "/checkpoints")
JOB = Job(0, "hetctl-run-0-a", "", JobState.SUBMITTING, 1, 600, 0.0)


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


@pytest.fixture
def catalog(home):
    with Catalog.open(home.catalog) as opened:
        opened.add_run(SPEC, Plan("fluid", "makespan", 2, 2, 1.0, 1.0, 1.0, ()), 1.0, JOB)
        yield opened


@pytest.fixture
def run(home):
    folder = home.run("run").create()
    EventWriter(folder.events, DRIVER, 0).write("job_started", job=0)
    for name in "ab":
        EventWriter(folder.events, name, 0).write("started", epochs=0, part_samples=0)
        tell(folder, name, 1)
    return folder


def tell(folder, name, number):
    result = {"metrics": {"loss": 1.0}, "duration_s": 1.0, "gpus": 1, "finished_at": float(number)}
    EventWriter(folder.events, name, 0).write("epoch", epoch=number, **result)


@pytest.fixture
def opened(monkeypatch):
    """Names of the event files that are opened."""
    names, really = [], os.open

    def noted(path, flags, *how, **more):
        names.extend([Path(path).stem] if str(path).endswith(".jsonl") else [])
        return really(path, flags, *how, **more)

    monkeypatch.setattr(os, "open", noted)
    return names


def numbers(catalog):
    return {name: [done.epoch for done in epochs] for name, epochs in catalog.epochs("run").items()}


def test_only_files_that_have_grown_are_read(catalog, run, opened):
    collect(catalog, run)
    tell(run, "b", 2)
    opened.clear()
    collect(catalog, run)
    assert sorted(opened) == ["b", DRIVER]
    assert numbers(catalog) == {"a": [1], "b": [1, 2]}


def test_what_was_stored_before_a_crash_is_not_read_again(catalog, run, opened, monkeypatch):
    monkeypatch.setattr(module, "PORTION", 1)
    really, calls = Catalog.ingest, []

    def crash(self, *given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return really(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Catalog, "ingest", crash)
        with pytest.raises(KeyboardInterrupt):
            collect(catalog, run)
    assert numbers(catalog) == {"a": [1]}
    opened.clear()
    collect(catalog, run)
    assert sorted(opened) == ["b", DRIVER]
    assert numbers(catalog) == {"a": [1], "b": [1]}


def test_a_file_that_was_cut_is_read_from_its_beginning(catalog, run):
    collect(catalog, run)
    path = run.events_of("a")
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    tell(run, "b", 2)
    collect(catalog, run)
    assert numbers(catalog) == {"a": [1], "b": [1, 2]}
