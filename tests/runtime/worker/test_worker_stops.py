"""Reasons for groups to leave, as a rank hears of them."""

from __future__ import annotations

import os
import signal

from hetctl.runtime.worker.messages import StopMessage
from hetctl.runtime.worker.stops import Stops


def stops_that_report():
    reports = []
    return Stops(lambda: reports.append(True)), reports


def test_the_drivers_first_word_stands_and_is_for_its_group_alone():
    stops, reports = stops_that_report()
    stops.add(StopMessage("key", "resize"))
    stops.add(StopMessage("key", "deadline"))
    assert (stops.reason("key"), stops.reason("other"), reports) == ("resize", None, [])


def test_sigterm_is_a_reason_for_the_group_at_work_and_reported_once():
    stops, reports = stops_that_report()
    with stops.heeding_sigterm("key"):
        assert stops.reason("key") is None
        signal.raise_signal(signal.SIGTERM)
        assert reports == []  # not from within the handler
        assert [stops.reason("key"), stops.reason("key")] == ["signal", "signal"]
    assert reports == [True]
    assert stops.reason("other") is None
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_does_not_change_what_the_driver_has_said():
    stops, reports = stops_that_report()
    with stops.heeding_sigterm("key"):
        stops.add(StopMessage("key", "resize"))
        signal.raise_signal(signal.SIGTERM)
        assert stops.reason("key") == "resize"
    assert reports == [True]


def ended_by(body) -> int:
    """Run something in a process of its own; return its exit code."""
    if (pid := os.fork()) == 0:
        try:
            body()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_second_sigterm_ends_the_process():
    def twice():
        with Stops(lambda: None).heeding_sigterm("key"):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    assert ended_by(twice) == -signal.SIGTERM


def test_each_task_has_its_own_first_sigterm():
    def once_in_each():
        stops = Stops(lambda: None)
        for key in ("one", "two"):
            with stops.heeding_sigterm(key):
                signal.raise_signal(signal.SIGTERM)

    assert ended_by(once_in_each) == 0


def test_what_a_users_function_has_forked_ends_at_its_first_sigterm():
    with Stops(lambda: None).heeding_sigterm("key"):
        assert ended_by(lambda: signal.raise_signal(signal.SIGTERM)) == -signal.SIGTERM
