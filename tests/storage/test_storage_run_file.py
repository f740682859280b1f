"""The planner's memory passes from one job to the next in a file."""

from __future__ import annotations

import pytest

from hetctl.storage.paths import RunFolder
from hetctl.storage.run_file import read_memory, write_memory


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path).create()


def test_the_newest_memory_counts_and_nothing_is_a_memory_too(run):
    assert read_memory(run) is None
    for memory in ({"known": [1, 2]}, 7.5, None):
        write_memory(run, memory)
        assert read_memory(run) == memory


def test_no_file_is_written_for_nothing_or_for_no_news(run):
    write_memory(run, None)
    assert not run.memory.exists()
    write_memory(run, [1])
    written = run.memory.stat().st_mtime_ns
    write_memory(run, [1])
    assert run.memory.stat().st_mtime_ns == written
