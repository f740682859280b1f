from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from hetctl.core.ends import EXIT_CODES, LOST_PEER, Why
from hetctl.core.events import read_folder
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import LostPeerError, Place
from hetctl.runtime.worker.messages import MEASURE, Assignment, Task
from hetctl.runtime.worker.worker import WORK, work

FAILURES = {
    "a peer that is lost while the group meets": (LostPeerError("the others did not come"), LOST_PEER, []),
    "an error of its own": (ValueError("no such layer"), EXIT_CODES[Why.PROGRAM_ERROR], ["failed"]),
}


@pytest.mark.parametrize(("error", "code", "events"), FAILURES.values(), ids=FAILURES)
def test_a_rank_is_not_blamed_for_what_its_group_has_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    events: list[str],
) -> None:
    def fail(_assignment: Assignment, _context: WorkerContext) -> None:
        raise error

    for name in ("events", "logs"):
        (tmp_path / name).mkdir()
    monkeypatch.setitem(WORK, MEASURE, fail)
    assignment = Assignment(Task(MEASURE, str(tmp_path), "m"), Place(1, 2), 0.0)
    with ExitStack() as keep:
        assert work(assignment, WorkerContext(Binding("n1", 0, None, (0,)), keep)) == code
    assert [event.kind for event in read_folder(tmp_path / "events")] == events
    assert str(error) in capsys.readouterr().err
