"""Files and folders below the home: private, and complete or absent."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import stat

import pytest

from hetctl.storage.atomic_io import make_private_folder, write_json, write_private
from hetctl.storage.paths import Home, RunFolder, member_folder


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.usefixtures("open_umask")
def test_folders_and_files_are_private_with_an_open_umask(tmp_path):
    run = Home(tmp_path / "home").run("digits-001")
    write_json(run.create().spec, {})
    folders = [tmp_path / "home", run.path.parent, run.path, run.events, run.logs]
    assert {mode(folder) for folder in folders} == {0o700}
    assert mode(run.spec) == 0o600


@pytest.mark.usefixtures("open_umask")
def test_folders_that_were_there_keep_their_mode(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    assert make_private_folder(shared / "a" / "b") == shared / "a" / "b"
    assert mode(shared) == 0o755
    assert (mode(shared / "a"), mode(shared / "a" / "b")) == (0o700, 0o700)


def test_making_a_folder_twice_is_making_it_once(tmp_path):
    assert make_private_folder(tmp_path / "a") == make_private_folder(tmp_path / "a") == tmp_path / "a"


def test_a_new_text_replaces_the_old_one_whole(tmp_path):
    path = tmp_path / "file"
    write_private(path, "old" * 1000)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert tree(tmp_path) == ["file"]


def _write_with_little_room(path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        write_private(path, "x" * 10_000)
    except OSError:
        os._exit(42)
    os._exit(0)


def test_a_full_disk_leaves_the_old_file_and_no_partial_one(tmp_path):
    path = tmp_path / "file"
    write_private(path, "old")
    writer = multiprocessing.get_context("fork").Process(target=_write_with_little_room, args=(path,))
    writer.start()
    writer.join()
    assert writer.exitcode == 42
    assert path.read_text() == "old"
    assert tree(tmp_path) == ["file"]


def test_a_crash_before_the_rename_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_private(path, "old")

    def crash(_descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        write_private(path, "new")
    assert path.read_text() == "old"
    assert tree(tmp_path) == ["file"]


def test_a_value_outside_json_does_not_replace_the_file(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("inf")})
    assert json.loads(path.read_text()) == {"a": 1}


def test_readers_see_one_text_or_the_other_while_it_is_replaced(tmp_path):
    path = tmp_path / "file"
    texts = ["a" * 5000, "b" * 7000]
    write_private(path, texts[0])

    def replace():
        for turn in range(30):
            write_private(path, texts[turn % 2])

    writer = multiprocessing.get_context("fork").Process(target=replace)
    writer.start()
    seen = {path.read_text() for _ in range(300)}
    writer.join()
    assert seen <= set(texts)


def test_the_files_of_a_job_bear_its_number(tmp_path):
    job = RunFolder(tmp_path).job(7)
    own = [job.script, job.log, job.claim, job.stop, job.live_metrics, job.agents.address, job.agents.log]
    own += [job.round_inputs, job.exchange_log]
    assert {path.parent for path in own} == {tmp_path}
    assert all(path.name.startswith("job-0007.") for path in own)
    assert len(set(own)) == len(own)


def test_runs_share_no_checkpoints(tmp_path):
    folders = {member_folder(tmp_path, run, member) for run in ("r-1", "r-2") for member in "ab"}
    assert len(folders) == 4
    assert {folder.parent for folder in folders} == {tmp_path / "r-1", tmp_path / "r-2"}
