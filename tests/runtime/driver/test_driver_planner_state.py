"""What a planner remembers is what the next job starts with."""

from __future__ import annotations

import pytest

from hetctl.runtime.driver.planner_state import last_memory, remember
from hetctl.storage.paths import RunFolder


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path).create()


def test_the_newest_memory_counts_and_nothing_is_a_memory_too(run):
    assert last_memory(run) is None
    for memory in ({"known": [1, 2]}, 7.5, None):
        remember(run, memory)
        assert last_memory(run) == memory


def test_no_file_is_written_for_nothing_or_for_no_news(run):
    remember(run, None)
    assert not run.memory.exists()
    remember(run, [1])
    written = run.memory.stat().st_mtime_ns
    remember(run, [1])
    assert run.memory.stat().st_mtime_ns == written
