"""Event files: written events are read, even if a writer is killed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.storage.event_files import EventQueue, EventWriter, read_events, read_folder
from hetctl.storage.patience import Patience


def write_many(folder, count):
    writer = EventWriter(folder, "m")
    for number in range(count):
        writer.write("told", pid=os.getpid(), number=number, filler="x" * 300)


def test_events_are_read_with_numbers_and_in_order(tmp_path):
    writer, data = EventWriter(tmp_path, "m"), {"epochs": 0, "part_samples": 0}
    writer.write("started", **data)
    writer.write("measured", metrics={"loss": 0.5})
    first, second = read_events(writer.path)
    assert (first.source, first.seq, first.kind, dict(first.data)) == ("m", 0, "started", data)
    assert (second.seq, second.data["metrics"]) == (1, {"loss": 0.5})
    assert first.time <= second.time


def test_a_file_that_is_not_there_has_no_events(tmp_path):
    assert list(read_events(tmp_path / "m.jsonl")) == []
    assert read_folder(tmp_path / "nowhere") == []


def test_a_torn_last_line_is_not_read_until_it_is_whole(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"kind": "a", "time": 1}\n{"kind": "b", "ti')
    assert [event.kind for event in read_events(path)] == ["a"]
    path.write_text('{"kind": "a", "time": 1}\n{"kind": "b", "time": 2}\n')
    assert [event.kind for event in read_events(path)] == ["a", "b"]


def test_a_torn_line_in_the_middle_keeps_the_others_numbers(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"kind": "a", "time": 1}\n{"kind": "b", "ti\n{"kind": "c", "time": 3}\n')
    assert [(event.kind, event.seq) for event in read_events(path)] == [("a", 0), ("c", 2)]


@pytest.mark.parametrize(
    "line", ["", "null", "3", "[1]", '{"kind": "a"}', '{"time": 1}', '{"kind": "a", "time": "soon"}', "{}}"]
)
def test_lines_that_are_no_events_are_passed_over(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_text(f'{line}\n{{"kind": "z", "time": 1}}\n')
    assert [(event.kind, event.seq) for event in read_events(path)] == [("z", 1)]


@given(st.binary(max_size=200))
def test_no_bytes_at_all_stop_the_reader(tmp_path_factory, noise):
    path = tmp_path_factory.mktemp("events") / "m.jsonl"
    path.write_bytes(noise.replace(b"\n", b"") + b'\n{"kind": "z", "time": 1}\n')
    assert [event.kind for event in read_events(path)][-1] == "z"


def test_a_non_finite_number_is_refused_before_writing(tmp_path):
    writer = EventWriter(tmp_path, "m")
    with pytest.raises(ValueError, match="JSON"):
        writer.write("epoch", loss=float("nan"))
    assert not writer.path.exists()


def test_writers_at_once_tear_no_line_of_each_other(tmp_path):
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write_many, args=(tmp_path, 40)) for _ in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    events = list(read_events(tmp_path / "m.jsonl"))
    # Not one after the other: a line that crosses a page may be seen half written, and the next one then
    # begins with an empty line.
    assert len({event.seq for event in events}) == 160
    for process in writers:
        own = [event.data["number"] for event in events if event.data["pid"] == process.pid]
        assert own == list(range(40))


def test_a_folder_is_read_in_order_of_time(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"kind": "1", "time": 1}\n{"kind": "3", "time": 3}\n')
    (tmp_path / "a.jsonl").write_text('{"kind": "2", "time": 2}\n')
    (tmp_path / "a.txt").write_text('{"kind": "no", "time": 2}\n')
    assert [event.kind for event in read_folder(tmp_path)] == ["1", "2", "3"]


def test_event_files_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        EventWriter(tmp_path, "m").write("started", epochs=0, part_samples=0)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m.jsonl").stat().st_mode) == 0o600


def test_the_next_event_starts_a_new_line_after_a_torn_one(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"kind": "a", "time": 1}\n{"kind": "b", "ti')
    writer = EventWriter(tmp_path, "m")
    writer.write("c")
    writer.write("d")
    assert [(event.kind, event.seq) for event in read_events(path)] == [("a", 0), ("c", 2), ("d", 3)]


def test_the_file_length_is_reported_after_the_event_is_on_disk(tmp_path):
    path, told = tmp_path / "m.jsonl", []

    def hear(length):
        told.append((length, [event.kind for event in read_events(path)]))

    path.write_text('{"kind": "torn')
    writer = EventWriter(tmp_path, "m", on_written=hear)
    writer.write("a")
    first = path.stat().st_size
    writer.write_all(("b", {}), ("told", {"number": 7}))
    writer.write_all()
    assert told == [(first, ["a"]), (path.stat().st_size, ["a", "b", "told"])]
    assert [event.data for event in read_events(path)] == [{}, {}, {"number": 7}]


def test_half_an_event_is_taken_back(tmp_path, monkeypatch):
    told = []
    writer = EventWriter(tmp_path, "a", on_written=told.append)
    writer.write("first")
    whole = os.write
    # The whole second event, and none of the third.
    monkeypatch.setattr(os, "write", lambda descriptor, lines: whole(descriptor, lines[:-30]))
    with pytest.raises(OSError, match="No space left"):
        writer.write_all(("second", {}), ("third", {}))
    monkeypatch.undo()
    assert told == [writer.path.stat().st_size]
    writer.write("third")
    assert [event.kind for event in read_events(writer.path)] == ["first", "third"]


FAULTS = ["before write", "after write", "sync keeps", "sync drops", "sync keeps, others append"]


@pytest.mark.parametrize("fault", FAULTS)
def test_an_event_is_written_once_in_spite_of_an_error(tmp_path, monkeypatch, fault):
    """Of a failed fsync(2) the kernel keeps the pages, or forgets them: another one alone would succeed."""
    told = []
    writer = EventWriter(tmp_path, "m", on_written=told.append, patience=Patience(sleep=lambda _: None))
    other = EventWriter(tmp_path, "m")
    writer.write("first")
    length, write = writer.path.stat().st_size, os.write

    def fail_once(name, function):
        def failing(*arguments):
            monkeypatch.undo()
            function(*arguments)
            raise OSError(errno.EIO, "I/O error")

        monkeypatch.setattr(os, name, failing)

    if fault == "before write":
        fail_once("write", lambda *_: None)
    elif fault == "after write":
        fail_once("write", write)
    elif fault == "sync drops":
        fail_once("fsync", lambda descriptor: os.ftruncate(descriptor, length))
    else:
        fail_once("fsync", lambda _: other.write("other") if "others" in fault else None)
    writer.write("second")
    expected = ["first", "second", "other"] if "others" in fault else ["first", "second"]
    assert [event.kind for event in read_events(writer.path)] == expected
    assert told[-1] == writer.path.stat().st_size


def test_a_line_is_written_again_after_a_failed_sync(tmp_path, monkeypatch):
    writer = EventWriter(tmp_path, "m", patience=Patience(sleep=lambda _: None))
    writer.write("first")
    sync, pwrite, calls = os.fsync, os.pwrite, []

    def fail_once(_descriptor):
        monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("sync") or sync(descriptor))
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "fsync", fail_once)
    monkeypatch.setattr(os, "pwrite", lambda *arguments: calls.append("write") or pwrite(*arguments))
    writer.write("second")
    assert calls == ["write", "sync"]
    assert [event.kind for event in read_events(writer.path)] == ["first", "second"]


def test_queued_events_wait_for_the_disk_in_their_order(tmp_path, monkeypatch):
    errors, told, really = [], [], os.open
    events = EventQueue(tmp_path, errors.append)
    first, second = events.writer("driver", 3), events.writer("m", 3, told.append)

    def stale(path, *how):
        if str(path).endswith("driver.jsonl"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return really(path, *how)

    monkeypatch.setattr(os, "open", stale)
    first.write("first")
    second.write("second")
    assert [error.errno for error in errors] == [errno.ESTALE] * 2
    assert events.error is errors[-1]
    with pytest.raises(OSError, match="Stale"):
        events.flush()
    assert (told, read_folder(tmp_path)) == ([], [])
    monkeypatch.undo()
    events.flush()
    assert [(event.kind, event.round) for event in read_folder(tmp_path)] == [("first", 3), ("second", 3)]
    assert told == [(tmp_path / "m.jsonl").stat().st_size]


def test_a_queue_does_not_keep_what_a_full_disk_refuses(tmp_path, monkeypatch):
    errors = []
    events = EventQueue(tmp_path, errors.append)

    def full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    events.writer("driver", 0).write("lost")
    monkeypatch.undo()
    events.writer("driver", 0).write("kept")
    assert [error.errno for error in errors] == [errno.ENOSPC]
    assert [event.kind for event in read_folder(tmp_path)] == ["kept"]


def test_without_patience_the_first_error_is_raised(tmp_path, monkeypatch):
    def stale(*_arguments):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "open", stale)
    with pytest.raises(OSError, match="Stale"):
        EventWriter(tmp_path, "m").write("first")
