"""Files that ranks leave in the node's memory."""

from __future__ import annotations

import os

from hetctl.runtime.agent.shared_files import remove_shared_files


def test_files_of_the_process_alone_are_removed(tmp_path):
    user = f"{os.getuid():x}"
    own = ["torch_300_17_0", "torch_300_18_1", f"cuda.shm.{user}.12c.1"]
    others = [
        "torch_3001_17_0",
        f"cuda.shm.{user}.12c1.1",
        "cuda.shm.fff.12c.1",
        "torch_30_300_0",
        "hetctl-300",
    ]
    for name in own + others:
        (tmp_path / name).touch()
    remove_shared_files(300, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_a_folder_that_is_not_there_is_no_error(tmp_path):
    remove_shared_files(300, tmp_path / "none")
