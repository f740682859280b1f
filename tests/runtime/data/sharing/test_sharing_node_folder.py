"""Folders in the memory of a node: shared while they are used, and removed then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hetctl.model.errors import TransientInputError
from hetctl.runtime.data.sharing import node_folder as module
from hetctl.runtime.data.sharing.node_folder import folder_of, node_folder, run_key, state_folder

USER = """
import sys
from pathlib import Path
from hetctl.runtime.data.sharing import node_folder as module
module.MEMORY = Path(sys.argv[1])
with module.node_folder(sys.argv[2]) as folder:
    (folder / "data").touch()
    print("in", flush=True)
    sys.stdin.readline()
"""

SWEEPER = """
import sys
from pathlib import Path
from hetctl.runtime.data.sharing import node_folder as module
module.MEMORY = Path(sys.argv[1])
while True:
    with module.node_folder("other"):
        pass
"""


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MEMORY", tmp_path)
    return tmp_path


@pytest.fixture
def user(memory):
    """Start a process that uses a folder until it reads a line."""
    started = []

    def start(name):
        command = [sys.executable, "-c", USER, str(memory), name]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "in\n"
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_runs_of_one_name_in_two_projects_share_no_folder(memory, user):
    first, second = (run_key("main", f"/scratch/{project}/checkpoints") for project in ("a", "b"))
    assert run_key("main", "/scratch/a/checkpoints") == first
    user(state_folder(first, "n1"))
    with node_folder(state_folder(second, "n1")), node_folder(folder_of(second, "n1")):
        assert len(list(memory.glob("hetctl-*/main-*"))) == 3
    assert [folder.name for folder in memory.glob("hetctl-*/*")] == [state_folder(first, "n1")]


def test_the_last_to_leave_removes_the_folder(memory, user):
    with node_folder("run-1") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        other = user("run-1")
        (folder / "ring").touch()
    assert folder.exists()
    other.communicate("leave\n")
    assert list(memory.glob("hetctl-*/*")) == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next(memory, user):
    killed, alive = user("old"), user("alive")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert (memory / f"hetctl-{os.getuid()}" / "old" / "data").exists()
    with node_folder("new"):
        names = sorted(path.name for path in memory.glob("hetctl-*/*"))
        assert names == ["alive", "new"]
    alive.communicate("leave\n")


def test_leftovers_that_occupy_the_memory_are_removed_first(memory, user, tmp_path, monkeypatch):
    killed = user("old")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path / "disk"))
    own = memory / f"hetctl-{os.getuid()}"
    monkeypatch.setattr(module, "_has_room", lambda _: not (own / "old").exists())
    with node_folder("new") as folder:
        assert folder == own / "new"


def test_a_folder_exists_for_a_user_who_comes_as_the_last_leaves(user):
    for _ in range(8):
        leaving = user("busy")
        leaving.stdin.write("leave\n")
        leaving.stdin.flush()
        while leaving.poll() is None:
            with node_folder("busy") as folder:
                (folder / "mine").touch()
        assert leaving.returncode == 0


def test_a_folder_swept_amid_its_creation_is_created_again(memory):
    sweeping = subprocess.Popen([sys.executable, "-c", SWEEPER, str(memory)])
    try:
        for _ in range(2000):
            with node_folder("mine") as folder:
                (folder / "data").touch()
    finally:
        sweeping.kill()
        sweeping.wait()


def test_a_folder_of_others_is_refused(memory):
    folder = memory / f"hetctl-{os.getuid()}"
    folder.mkdir(mode=0o755)
    folder.chmod(0o777)
    with pytest.raises(TransientInputError, match="accessible to other users"), node_folder("run"):
        pytest.fail("used")


def test_without_memory_to_share_there_is_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MEMORY", tmp_path / "none")
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    with node_folder("run") as folder:
        assert folder.parent.parent == tmp_path


def test_little_memory_is_left_alone_unless_it_is_in_use(tmp_path, monkeypatch, user):
    first = user("run")
    monkeypatch.setattr(module, "LEAST_FREE", 2**62)
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path / "disk"))
    with node_folder("run") as folder:
        assert (folder / "data").exists()
    first.communicate("leave\n")
    with node_folder("run") as folder:
        assert folder.parent.parent == tmp_path / "disk"


def test_a_folder_on_the_disk_of_an_earlier_boot_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MEMORY", tmp_path / "none")
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    left = tmp_path / f"hetctl-{os.getuid()}" / "01234567-run"
    left.mkdir(parents=True)
    left.parent.chmod(0o700)
    with node_folder("run") as folder:
        assert (folder.name[8:], folder != left) == ("-run", True)
        assert not left.exists()
