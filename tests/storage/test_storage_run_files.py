"""Files of a run that are replaced as a whole: what passes from job to job, and what a damaged one means."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hetctl.model.errors import DamagedFileError
from hetctl.storage.paths import RunFolder
from hetctl.storage.profile_request import read_jobs, read_measurements
from hetctl.storage.run_files import (
    read_claim,
    read_planner_state,
    read_record,
    read_spec,
    write_planner_state,
)

DAMAGES = {"empty": b"", "cut off": b'{"name": "x", ', "another value": b"[7]", "no text": b"\xff\xfe{}"}
NEEDED = {
    "run.json": (lambda folder: read_spec(RunFolder(folder)), "`hetctl submit` writes it anew"),
    "measurements.json": (read_measurements, "delete it"),
    "jobs.json": (read_jobs, "delete it"),
}
SPARE = {
    "record.json": lambda folder: read_record(RunFolder(folder)),
    "planner.json": lambda folder: read_planner_state(RunFolder(folder)),
}


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path).create()


def test_the_newest_memory_counts_and_nothing_is_a_memory_too(run):
    assert read_planner_state(run) is None
    for memory in ({"known": [1, 2]}, 7.5, None):
        write_planner_state(run, memory)
        assert read_planner_state(run) == memory


def test_no_file_is_written_for_nothing_or_for_no_news(run):
    write_planner_state(run, None)
    assert not run.planner_state.exists()
    write_planner_state(run, [1])
    written = run.planner_state.stat().st_mtime_ns
    write_planner_state(run, [1])
    assert run.planner_state.stat().st_mtime_ns == written


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", NEEDED)
def test_a_damaged_file_is_named_with_the_next_step(tmp_path, name, damage):
    read, step = NEEDED[name]
    (tmp_path / name).write_bytes(DAMAGES[damage])
    with pytest.raises(DamagedFileError, match=f"{name} is damaged") as caught:
        read(tmp_path)
    assert step in caught.value.hint


def test_a_claim_that_is_no_text_is_named(run):
    run.job(0).claim.write_bytes(b"\xff")
    with pytest.raises(DamagedFileError, match=r"job-0000.claim is damaged"):
        read_claim(run.job(0))


@pytest.mark.parametrize("damage", ["empty", "cut off", "no text"])
@pytest.mark.parametrize("name", SPARE)
def test_a_damaged_file_that_others_replace_is_not_used(tmp_path, caplog, name, damage):
    (tmp_path / name).write_bytes(DAMAGES[damage])
    assert SPARE[name](tmp_path) is None
    assert f"{name} is damaged" in caplog.text


@pytest.mark.parametrize("name", [*NEEDED, *SPARE])
def test_a_disk_that_does_not_answer_is_no_damage(tmp_path, monkeypatch, name):
    def no_answer(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "read_text", no_answer)
    with pytest.raises(OSError, match="Stale file handle"):
        SPARE.get(name, NEEDED.get(name, (None,))[0])(tmp_path)
