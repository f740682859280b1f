from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from hetctl.model.exit_reason import EXIT_CODES, LOST_PEER, ExitReason
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import LostPeerError, RankInfo
from hetctl.runtime.worker.messages import MEASURE, Assignment, TaskMessage
from hetctl.runtime.worker.reporting import writer_of
from hetctl.runtime.worker.worker import WORK, work
from hetctl.storage.event_files import read_folder

FAILURES = {
    "a peer that is lost while the group meets": (LostPeerError("the others did not come"), LOST_PEER, []),
    "an error of its own": (ValueError("no such layer"), EXIT_CODES[ExitReason.PROGRAM_ERROR], ["failed"]),
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

    told: list[int] = []
    monkeypatch.setitem(WORK, MEASURE, fail)
    with ExitStack() as keep:
        context = WorkerContext(Binding("n1", 0, None, (0,)), keep, send_written=told.append)
        assert work(_assignment(tmp_path), context) == code
    assert [event.kind for event in read_folder(tmp_path / "events")] == events
    assert told == [path.stat().st_size for path in (tmp_path / "events").iterdir()]
    assert str(error) in capsys.readouterr().err


def test_an_event_that_cannot_be_told_is_on_the_disk(tmp_path: Path) -> None:
    def refuse(_length: int) -> None:
        raise ConnectionResetError

    task = _assignment(tmp_path).task
    writer_of(task, refuse).write("started")
    assert [event.kind for event in read_folder(task.events)] == ["started"]


def _assignment(folder: Path) -> Assignment:
    for name in ("events", "logs"):
        (folder / name).mkdir()
    return Assignment(TaskMessage(MEASURE, str(folder), "m"), RankInfo(1, 2), 0.0)
