"""Snapshots of the state of a run: they spare reads, and do not change results."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_storage_run_state import ENSEMBLE, NAMES, NOW, RETRIES, histories

from hetctl.model.events import DRIVER, REQUESTS
from hetctl.storage import event_log
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_state import RunState
from hetctl.storage.snapshot import StaleSnapshotError


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path).create()


def state_of(run):
    state = RunState(run, ENSEMBLE, RETRIES)
    return state, state.refresh()


def told(state, news):
    """Return the values of a state."""
    tasks = {name: state.tasks_of(name) for name in NAMES}
    reports = {key: state.reports[key] for key in state.usage.open_tasks}
    rounds = {index: dict(events) for index, events in state.facts.rounds.items()}
    facts = rounds, state.facts.jobs, state.facts.first_step, state.facts.last, state.facts.began_at
    moments = state.usage.began_at, state.usage.next_round
    return dict(state.progress), state.usage.used(NOW), news, tasks, reports, facts, moments


def without_snapshot(run):
    run.state.unlink(missing_ok=True)
    return told(*state_of(run))


def files_of(history):
    """Return what is in each file: a member's has all rounds, one after another."""
    files = defaultdict(bytes)
    for event in (event for file in history for event in file):
        line = {"kind": event.kind, "time": event.time, "round": event.round, **event.data}
        files[event.source] += json.dumps(line).encode() + b"\n"
    return files


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_going_on_from_a_snapshot_is_reading_everything(tmp_path_factory, data):
    run = RunFolder(tmp_path_factory.mktemp("run")).create()
    files = files_of(data.draw(histories()))
    for _ in range(2):
        for source, text in files.items():
            path = run.events_of(source)
            done = path.stat().st_size if path.exists() else 0
            path.write_bytes(text[: data.draw(st.integers(done, len(text)))])
        state_of(run)[0].keep()
    for source, text in files.items():
        run.events_of(source).write_bytes(text)
    assert told(*state_of(run)) == without_snapshot(run)


def begin(run):
    """Write a run of two rounds, of which the second is active."""
    for index, names in enumerate((NAMES, NAMES[:2])):
        driver = EventWriter(run.events, DRIVER, index)
        if index == 0:
            driver.write("job_started", job=0)
        driver.write("round_started", job=0, predicted_s=1.0, members=names)
        for name in names:
            driver.write("task_started", member=name, gpus=1, placement=[{"node": "n", "gpus": [0]}])
            EventWriter(run.events, name, index).write("first_step", startup_s=1.0)
            epoch = {
                "epoch": index + 1,
                "metrics": {"loss": 1.0},
                "duration_s": 1.0,
                "gpus": 1,
                "finished_at": 0.0,
            }
            EventWriter(run.events, name, index).write("epoch", **epoch, rate=9.0, evaluate_s=0.1)
            if index == 0:
                driver.write("task_ended", member=name, exit_code=0, reason="told", description="told")


def test_only_new_events_are_read(run, monkeypatch):
    begin(run)
    state_of(run)[0].keep()
    EventWriter(run.events, "a", 1).write("stopped", reason="late")
    opened, really = [], os.open

    def noted(path, flags, *how):
        opened.extend([Path(path).stem] if str(path).endswith(".jsonl") else [])
        return really(path, flags, *how)

    monkeypatch.setattr(os, "open", noted)
    state, news = state_of(run)
    assert sorted(opened) == [REQUESTS, "a", "b", DRIVER]
    assert state.reports[1, "a"].stop_reasons == ("late",)
    monkeypatch.undo()
    assert told(state, news) == without_snapshot(run)


def test_a_lazy_state_asks_for_no_sizes(run, monkeypatch):
    begin(run)
    state_of(run)[0].keep()
    EventWriter(run.events, DRIVER, 1).write("task_started", member=NAMES[-1], gpus=1, placement=[])
    for name in ("a", NAMES[-1]):
        EventWriter(run.events, name, 1).write("stopped", reason="late", part_samples=7)
    monkeypatch.setattr(event_log, "_sizes_in", None)
    lazy = RunState(run, ENSEMBLE, RETRIES, lazily=True)
    lazy.refresh()
    assert {name: done.part_samples for name, done in lazy.progress.items() if done.part_samples} == {
        "a": 7,
        NAMES[-1]: 7,
    }


def test_without_news_no_snapshot_is_written(run):
    begin(run)
    state, _ = state_of(run)
    state.keep()
    run.state.unlink()
    state.refresh()
    state.keep()
    assert not run.state.exists()


def _cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def _say(path, **changes):
    first, *others = path.read_text().split("\n")
    path.write_text("\n".join([json.dumps({**json.loads(first), **changes}), *others]))


def _garble_tasks(path):
    first, tasks = path.read_text().split("\n", 1)
    path.write_text(f"{first}\n{tasks.replace('0', '1')}")


SPOILT = {
    "empty": lambda run: run.state.write_bytes(b""),
    "zeros": lambda run: run.state.write_bytes(bytes(99)),
    "another value": lambda run: run.state.write_text("[]"),
    "torn": lambda run: _cut(run.state),
    "a file is shorter": lambda run: _cut(run.events_of("a")),
    "a file is gone": lambda run: run.events_of("b").unlink(),
    "of another run": lambda run: _say(run.state, of="another"),
    "garbled tasks": lambda run: _garble_tasks(run.state),
    "no lines": lambda run: _say(run.state, lines=None),
    "no facts": lambda run: _say(run.state, events=None),
    "garbled reports": lambda run: _say(run.state, reports=[[0, "a", {"stop_reasons": 3}]]),
    "a list of progress": lambda run: _say(run.state, progress=[]),
    "another member": lambda run: _say(run.state, progress={"x": [[0, "x", 0], "", ["x", []]]}),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_snapshot_that_does_not_fit_is_none(run, spoil):
    begin(run)
    state_of(run)[0].keep()
    spoil(run)
    found = told(*state_of(run))
    assert found == without_snapshot(run)
    assert len(found[0]["c"].epochs) == 1


def test_all_events_are_read_again_if_an_earlier_one_appears(run):
    begin(run)
    state_of(run)[0].keep()
    state, _ = state_of(run)
    with run.events_of("a").open("a") as events:
        events.write('{"kind": "converged", "time": 1.0, "round": 1, "reason": "early"}\n')
    assert told(state, state.refresh()) == without_snapshot(run)
    assert state.progress["a"].converged == "early"


def test_the_snapshot_is_private(run):
    begin(run)
    state_of(run)[0].keep()
    assert run.state.stat().st_mode & 0o777 == 0o600


def test_a_line_is_read_from_the_snapshot_that_has_it_or_not_at_all(run):
    begin(run)
    first, _ = state_of(run)
    first.keep()
    lazy = RunState(run, ENSEMBLE, RETRIES, lazily=True)
    lazy.refresh()
    assert len(lazy.progress["a"].epochs) == 2
    assert lazy.progress["a"].epochs == first.progress["a"].epochs
    EventWriter(run.events, "b", 1).write("stopped", reason="late")
    first.refresh()
    first.keep()
    with pytest.raises(StaleSnapshotError):
        list(lazy.progress["b"].epochs)
