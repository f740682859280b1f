"""Scratch copies of a project's folder: a script finds its data there, and replaces no results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetctl.storage import project_copy
from hetctl.storage.project_copy import copy_project, linked_in


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a project with data, results, an environment, and a link to a disk of its own."""
    monkeypatch.setattr(project_copy, "MOST_BYTES", 100)
    monkeypatch.setattr(project_copy, "MOST_FILES", 10)
    folder = tmp_path / "project"
    for name in ("data/a/x", "out/last", ".venv/pyvenv.cfg", "large/x", "many/0", "train.py", ".env"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (folder / "large" / "x").write_text(101 * "x")
    for number in range(11):
        (folder / "many" / str(number)).touch()
    (tmp_path / "disk").mkdir()
    (folder / "disk").symlink_to("../disk")
    (folder / "data" / "disk").symlink_to("../../disk")
    os.mkfifo(folder / "pipe")
    return folder


def test_what_is_written_in_a_copy_replaces_nothing(project, tmp_path):
    copy = tmp_path / "copy"
    copy_project(project, copy, lambda: None)
    for name in ("out/last", "out/next", "data/a/x", ".env", "new"):
        (copy / name).write_text("written")
    assert (project / "out" / "last").read_text() == "out/last"
    assert (project / "data" / "a" / "x").read_text() == "data/a/x"
    assert (project / ".env").read_text() == ".env"
    assert not (project / "out" / "next").exists()
    assert (copy / "train.py").read_text() == "train.py"


def test_large_folders_and_links_are_found_by_their_relative_paths(project, tmp_path):
    copy = tmp_path / "copy"
    copy_project(project, copy, lambda: None)
    for name in ("large", "many", "disk", ".venv", "data/disk", "pipe"):
        assert (copy / name).is_symlink()
        assert (copy / name).resolve() == (project / name).resolve()
    assert linked_in(project) == ["disk", "large", "many"]


def test_a_copy_in_its_own_project_does_not_hold_itself(project):
    (project / "runs").mkdir()
    copy_project(project, project / "runs" / "copy", lambda: None)
    assert Path(project, "runs", "copy", "runs").is_symlink()
