"""The log of a run: each event is read once, and files of ended steps are not opened again."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.events import DRIVER, REQUESTS
from hetctl.storage.event_files import EventWriter, read_events
from hetctl.storage.event_log import EventFile, EventLog, end_of_file
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import events_in

HEADS = (REQUESTS, DRIVER)
"""Files that each reading opens."""


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path)


@pytest.fixture
def opened(monkeypatch):
    """The writers whose files were opened for reading."""
    found = []
    really = os.open

    def noted(path, flags, *how):
        if flags == os.O_RDONLY and str(path).endswith(".jsonl"):
            found.append(Path(path).stem)
        return really(path, flags, *how)

    monkeypatch.setattr(os, "open", noted)
    return found


def write(run, index, source, kind, **data):
    EventWriter(run.create().events, source, index).write(kind, **data)


def begin(run, index, *members, job=None):
    """Report a round whose members are about to start, and its job where it is the first of one."""
    if job is not None:
        write(run, index, DRIVER, "job_started", job=job)
    write(run, index, DRIVER, "round_started", job=job or 0, predicted_s=1.0, members=list(members))
    for name in members:
        write(run, index, DRIVER, "task_started", member=name, gpus=1, placement=[])


def end(run, index, *members, over=True):
    for name in members:
        write(run, index, DRIVER, "task_ended", member=name, exit_code=0, reason="told", description="told")
    if over:
        write(run, index, DRIVER, "round_ended", ended_by="alpha")


def kinds(events):
    return [(event.round, event.source, event.kind) for event in events]


def test_appended_events_are_read_once(run):
    log = EventLog(run)
    assert log.read_new() == []
    begin(run, 0, "a", job=0)
    write(run, 0, "a", "started", epochs=0, part_samples=0)
    assert kinds(log.read_new()) == [
        (0, DRIVER, "job_started"),
        (0, DRIVER, "round_started"),
        (0, DRIVER, "task_started"),
        (0, "a", "started"),
    ]
    assert log.read_new() == []
    write(run, 0, "a", "first_step")
    (event,) = log.read_new()
    assert (event.kind, event.seq) == ("first_step", 1)


def test_files_of_later_members_are_found(run):
    begin(run, 0, "a", job=0)
    log = EventLog(run)
    log.read_new()
    write(run, 0, "a", "started", epochs=0, part_samples=0)
    begin(run, 1, "b")
    write(run, 1, "b", "started", epochs=0, part_samples=0)
    begin(run, 2, "c")
    assert {event[:2] for event in kinds(log.read_new())} == {(0, "a"), (1, DRIVER), (1, "b"), (2, DRIVER)}


def test_half_a_line_is_read_when_it_is_whole(run):
    path = run.create().events_of("a")
    begin(run, 0, "a")
    line = json.dumps({"kind": "told", "time": 1.0, "text": "ä"}, ensure_ascii=False).encode()
    log = EventLog(run)
    log.read_new()
    for end_at in (0, 5, len(line) - 3, len(line)):
        path.write_bytes(line[:end_at])
        assert log.read_new() == []
    path.write_bytes(line + b"\n")
    assert [event.data["text"] for event in log.read_new()] == ["ä"]


def test_garbled_lines_are_passed_over_and_keep_their_numbers(run):
    path = run.create().events_of("a")
    begin(run, 0, "a")
    path.write_text('{"kind": "a", "time": 1}\n{"kind": "b", "ti\n')
    log = EventLog(run)
    assert [event.seq for event in log.read_new() if event.source == "a"] == [0]
    with path.open("a") as file:
        file.write('{"kind": "epoch", "time": 2}\n{"kind": "c", "time": 3}\n')
    assert [(event.kind, event.seq) for event in log.read_new()] == [("c", 3)]


LINES = st.one_of(
    st.sampled_from(['{"kind": "a", "time": 1}', '{"kind": "b", "time": 2, "x": [1]}', "[1]", "{}}", ""]),
    st.text(st.characters(exclude_characters="\n\r\x85\u2028\u2029", exclude_categories=["Cs"]), max_size=9),
    st.builds(lambda at: f'{{"kind": "c", "time": 1}},{{"kind": "d", "time": {at}}}', st.integers(0, 9)),
)  # fmt: skip


@given(st.lists(LINES, max_size=8), st.lists(st.integers(0, 400), max_size=6))
def test_reading_in_pieces_is_reading_at_once(tmp_path_factory, lines, cuts):
    path = tmp_path_factory.mktemp("events") / "m.jsonl"
    whole = "".join(f"{line}\n" for line in lines).encode()
    file, found = EventFile(str(path), "m"), []
    for cut in [*sorted(cuts), len(whole)]:
        path.write_bytes(whole[:cut])
        found += file.read_new()
    assert found == list(read_events(path))


def test_a_file_longer_than_a_read_is_read_completely(run):
    write(run, 0, "a", "told", text="x" * 200_000)
    write(run, 0, "a", "told", text="y")
    assert [len(event.data["text"]) for event in EventLog(run).read_new()] == [200_000, 1]


def test_a_step_that_has_ended_is_not_opened_again(run, opened):
    begin(run, 0, "a", "b", job=0)
    write(run, 0, "a", "started", epochs=0, part_samples=0)
    log = EventLog(run)
    log.read_new()
    write(run, 0, "a", "stopped", reason="alpha")
    end(run, 0, "a", over=False)
    assert ("a", "stopped") in {(event.source, event.kind) for event in log.read_new()}
    opened.clear()
    log.read_new()
    assert opened == [*HEADS, "b"]


def test_a_file_has_the_events_of_all_rounds_of_its_member(run):
    for index in range(3):
        begin(run, index, "a", job=index)
        write(run, index, "a", "started", epochs=0, part_samples=0)
        end(run, index, "a")
    assert [event for event in kinds(EventLog(run).read_new()) if event[1] == "a"] == [
        (index, "a", "started") for index in range(3)
    ]
    assert sorted(path.name for path in run.events.iterdir()) == ["a.jsonl", "driver.jsonl"]


def test_members_that_are_not_in_training_are_not_opened_again(run, opened):
    begin(run, 0, "a", "b", job=0)
    end(run, 0, "a", "b")
    begin(run, 1, "a")
    log = EventLog(run)
    log.read_new()
    opened.clear()
    write(run, 0, DRIVER, "job_ended", job=0, reason="deadline")
    assert kinds(log.read_new()) == [(0, DRIVER, "job_ended")]
    assert opened == [*HEADS, "a"]


def test_the_folder_is_listed_once(run, monkeypatch):
    begin(run, 0, "a", job=0)
    log = EventLog(run)
    log.read_new()
    monkeypatch.setattr(Path, "iterdir", lambda _: pytest.fail("listed"))
    write(run, 0, "a", "started", epochs=0, part_samples=0)
    begin(run, 1, "b")
    write(run, 1, "b", "started", epochs=0, part_samples=0)
    assert {(0, "a", "started"), (1, "b", "started")} <= set(kinds(log.read_new()))


def test_files_without_a_started_step_are_read_once(run, opened):
    write(run, 0, "a", "told")
    log = EventLog(run)
    assert kinds(log.read_new()) == [(0, "a", "told")]
    opened.clear()
    log.read_new()
    assert opened == [*HEADS]


def test_files_of_outliving_trainers_are_read_until_the_next_end(run, opened):
    begin(run, 0, "a", "b", job=0)
    log = EventLog(run)
    log.read_new()
    begin(run, 1, "a", job=1)
    write(run, 0, "b", "stopped", reason="late")
    assert (0, "b", "stopped") in kinds(log.read_new())
    write(run, 0, "a", "stopped", reason="late")
    end(run, 1, "a", over=False)
    assert (0, "a", "stopped") in kinds(log.read_new())
    opened.clear()
    log.read_new()
    assert opened == [*HEADS, "b"]


def test_only_grown_files_are_opened_with_reported_lengths(run, opened):
    begin(run, 0, "a", "b", "c", job=0)
    log = EventLog(run)
    log.read_new({})
    for name in ("a", "b"):
        write(run, 0, name, "started", epochs=0, part_samples=0)
    length = run.events_of("a").stat().st_size
    opened.clear()
    assert kinds(log.read_new({"a": length})) == [(0, "a", "started")]
    assert opened == [*HEADS, "a"]
    opened.clear()
    assert log.read_new({"a": length}) == log.read_new({}) == []
    assert opened == [*HEADS, *HEADS]


def test_unreported_events_are_read_at_the_end_of_the_step(run):
    begin(run, 0, "a", job=0)
    log = EventLog(run)
    log.read_new({})
    write(run, 0, "a", "stopped", reason="alpha")
    assert log.read_new({}) == []
    end(run, 0, "a")
    assert (0, "a", "stopped") in kinds(log.read_new({}))


def test_events_unread_by_a_killed_driver_are_read_by_the_next(run):
    begin(run, 0, "a", job=0)
    EventLog(run).read_new({})
    write(run, 0, "a", "started", epochs=0, part_samples=0)
    log = EventLog(run)
    assert (0, "a", "started") in kinds(log.read_new({}))
    write(run, 0, "a", "stopped", reason="late")
    begin(run, 1, "a", job=1)
    assert (0, "a", "stopped") in kinds(log.read_new({}))


@pytest.mark.parametrize("ended", [False, True])
def test_a_length_that_does_not_show_yet_is_looked_for_again(run, opened, ended):
    begin(run, 0, "a", job=0)
    path = run.create().events_of("a")
    log = EventLog(run)
    log.read_new({})
    write(run, 0, "a", "started", epochs=0, part_samples=0)
    write(run, 0, "a", "first_step")
    whole = path.read_bytes()
    if ended:
        end(run, 0, "a")
    path.unlink()
    log.read_new({"a": len(whole)})
    for length, seen in ((10, []), (whole.index(b"\n") + 1, ["started"]), (len(whole), ["first_step"])):
        path.write_bytes(whole[:length])
        assert [event.kind for event in log.read_new({})] == seen
    opened.clear()
    assert log.read_new({}) == []
    assert opened == [*HEADS]


@pytest.mark.parametrize("name", ["", "../../x", "\0", "x" * 5000, "\ud800", "driver"])
def test_names_that_were_garbled_open_no_file(run, name):
    begin(run, 0, name)
    assert [event.kind for event in EventLog(run).read_new()] == ["round_started", "task_started"]


def test_all_events_are_in_order_of_time(run):
    run.create().events_of("a").write_text('{"kind": "2", "time": 2}\n{"kind": "4", "time": 4, "round": 1}\n')
    run.events_of("b").write_text('{"kind": "3", "time": 3, "round": 1}\n{"kind": "1", "time": 1}\n')
    assert [(event.kind, event.round) for event in events_in(run)] == [("1", 0), ("2", 0), ("3", 1), ("4", 1)]


def test_an_event_of_no_round_that_there_can_be_is_garbled(run):
    run.create().events_of("a").write_text('{"kind": "a", "time": 1, "round": "0"}\n')
    assert EventLog(run).read_new() == []


def test_a_file_can_be_read_from_its_end(run):
    write(run, 0, "a", "before")
    with run.events_of("a").open("a") as file:
        file.write('{"kind": "torn')
    file = end_of_file(run.events_of("a"), "a")
    write(run, 1, "a", "after")
    assert kinds(file.read_new()) == [(1, "a", "after")]
    none = end_of_file(run.events_of("b"), "b")
    write(run, 1, "b", "first")
    assert kinds(none.read_new()) == [(1, "b", "first")]


@pytest.mark.parametrize("victim", [DRIVER, "a", "b"])
def test_a_failed_read_loses_no_event_of_any_file(run, monkeypatch, victim):
    begin(run, 0, "a", "b", job=0)
    log, really = EventLog(run), os.open
    log.read_new({})
    for name in ("a", "b"):
        write(run, 0, name, "started", epochs=0, part_samples=0)
    end(run, 0, "a", "b")

    def stale(path, *how):
        if Path(path).stem == victim:
            raise OSError(errno.ESTALE, "Stale file handle")
        return really(path, *how)

    monkeypatch.setattr(os, "open", stale)
    for lengths in ({"a": 1}, {}):
        with pytest.raises(OSError, match="Stale"):
            log.read_new(lengths)
    monkeypatch.undo()
    assert kinds(log.read_new({})) == [
        *((0, DRIVER, kind) for kind in ("task_ended", "task_ended", "round_ended")),
        *((0, name, "started") for name in ("a", "b")),
    ]
    assert log.read_new({}) == []
