"""A rank at work: failures that it reports, and reasons for its group to stop."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from hetctl.model.events import EXIT_CODES, LOST_PEER, ExitReason
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.transport import Connection
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import LostPeerError, RankInfo
from hetctl.runtime.worker.messages import MEASURE, Assignment, TaskMessage
from hetctl.runtime.worker.worker import WORK, Inbox, Stops, work
from hetctl.storage.event_files import read_folder

FAILURES = {
    "a peer that is lost while the group meets": (LostPeerError("the others did not come"), LOST_PEER, []),
    "an error of its own": (ValueError("no such layer"), EXIT_CODES[ExitReason.PROGRAM_ERROR], ["failed"]),
}


@pytest.mark.parametrize(("error", "code", "events"), FAILURES.values(), ids=FAILURES)
def test_a_rank_that_lost_a_peer_reports_no_failure(
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

    def send(written: int) -> None:
        told.append(written)

    monkeypatch.setitem(WORK, MEASURE, fail)
    with ExitStack() as keep:
        context = WorkerContext(Binding("n1", 0, None, (0,)), keep, send)
        assert work(_assignment(tmp_path), context) == code
    assert [event.kind for event in read_folder(tmp_path / "events")] == events
    assert told == [path.stat().st_size for path in (tmp_path / "events").iterdir()]
    assert str(error) in capsys.readouterr().err


def test_an_event_is_on_disk_even_if_not_announced(tmp_path: Path) -> None:
    def refuse(**_message: object) -> None:
        raise ConnectionResetError

    task = _assignment(tmp_path).task
    with ExitStack() as keep:
        WorkerContext(Binding("n1", 0, None, (0,)), keep, refuse).writer(task).write("told")
    assert [event.kind for event in read_folder(task.events)] == ["told"]


def _assignment(folder: Path) -> Assignment:
    for name in ("events", "logs"):
        (folder / name).mkdir()
    return Assignment(TaskMessage(MEASURE, str(folder), "m"), RankInfo(1, 2), 0.0)


# Stops


def stops_that_report() -> tuple[Stops, list[bool]]:
    reports: list[bool] = []
    return Stops(lambda: reports.append(True)), reports


def test_the_first_stop_reason_stands_for_its_group_alone() -> None:
    stops, reports = stops_that_report()
    driver, rank = map(Connection, socket.socketpair())
    inbox = Inbox(rank, stops)
    for reason in ("resize", "deadline"):
        driver.send({"stop": "key", "reason": reason})
    driver.send({"shutdown": True})
    assert list(inbox.assignments()) == []
    assert (stops.reason("key"), stops.reason("other"), reports) == ("resize", None, [])


def test_sigterm_stops_the_group_at_work_and_is_reported_once() -> None:
    stops, reports = stops_that_report()
    with stops.stopping_at_sigterm("key"):
        assert stops.reason("key") is None
        signal.raise_signal(signal.SIGTERM)
        assert reports == []  # not from within the handler
        assert [stops.reason("key"), stops.reason("key")] == ["signal", "signal"]
    assert reports == [True]
    assert stops.reason("other") is None
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_does_not_change_the_drivers_reason() -> None:
    stops, reports = stops_that_report()
    with stops.stopping_at_sigterm("key"):
        stops.reasons["key"] = "resize"
        signal.raise_signal(signal.SIGTERM)
        assert stops.reason("key") == "resize"
    assert reports == [True]


def ended_by(body: Callable[[], object]) -> int:
    """Run a function in a forked process; return its exit code."""
    if (pid := os.fork()) == 0:
        try:
            body()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_second_sigterm_ends_the_process() -> None:
    def twice() -> None:
        with Stops(lambda: None).stopping_at_sigterm("key"):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    assert ended_by(twice) == -signal.SIGTERM


def test_each_task_has_its_own_first_sigterm() -> None:
    def once_in_each() -> None:
        stops = Stops(lambda: None)
        for key in ("one", "two"):
            with stops.stopping_at_sigterm(key):
                signal.raise_signal(signal.SIGTERM)

    assert ended_by(once_in_each) == 0


def test_a_process_forked_by_a_user_ends_at_its_first_sigterm() -> None:
    with Stops(lambda: None).stopping_at_sigterm("key"):
        assert ended_by(lambda: signal.raise_signal(signal.SIGTERM)) == -signal.SIGTERM


@pytest.mark.parametrize("is_needed", [True, False])
def test_sigterm_ends_an_idle_rank_once_it_has_saved(is_needed: bool) -> None:
    ended: list[bool] = []

    def signalled() -> None:
        stops = Stops(lambda: None)
        stops.end_idle(lambda: is_needed, lambda: ended.append(True))
        with stops.stopping_at_sigterm("key"):
            pass
        signal.raise_signal(signal.SIGTERM)
        os._exit(7 if ended == [True] else 1)

    assert ended_by(signalled) == (7 if is_needed else -signal.SIGTERM)
