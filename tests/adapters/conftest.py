"""What tests of all adapters share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from script_ends import ScriptEnds


@pytest.fixture
def start_script(monkeypatch, tmp_path) -> Iterator[Callable[[], ScriptEnds]]:
    """Give this process the variables of a script, anew at each call, with one folder for checkpoints."""
    started = []

    def start() -> ScriptEnds:
        started.append(ScriptEnds(monkeypatch, tmp_path))
        return started[-1]

    yield start
    for ends in started:
        ends.close()
