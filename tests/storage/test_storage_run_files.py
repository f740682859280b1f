"""The planner's memory passes from one job to the next in a file."""

from __future__ import annotations

import pytest

from hetctl.storage.paths import RunFolder
from hetctl.storage.run_files import read_planner_state, write_planner_state


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
