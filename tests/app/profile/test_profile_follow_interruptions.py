"""Signals that ask a command to end are kept, and raised where it can be left."""

from __future__ import annotations

import os
import signal

import pytest

from hetctl.app.profile.follow import HEEDED, Interruption, Interruptions


def send(number):
    os.kill(os.getpid(), number)


def send_both():
    try:
        send(signal.SIGTERM)
    finally:
        send(signal.SIGINT)


@pytest.mark.parametrize("number", HEEDED)
def test_a_signal_is_kept_until_it_is_heeded(number):
    with Interruptions() as interruptions:
        send(number)
        with pytest.raises(Interruption) as raised, interruptions.heeded():
            pytest.fail("it was there before")
        assert raised.value.number == number
        interruptions.check()  # only once


def test_a_heeded_signal_is_raised_and_the_next_one_is_kept():
    with Interruptions() as interruptions:
        with pytest.raises(Interruption), interruptions.heeded():
            send_both()
        with pytest.raises(Interruption) as raised:
            interruptions.check()
        assert raised.value.number == signal.SIGINT


class Signals:
    """Signals the process when it is deleted; Python ignores exceptions there, as after a fork."""

    def __del__(self):
        send(signal.SIGTERM)


def ignore(interruptions, checks):
    Signals()
    if checks:
        interruptions.check()
        pytest.fail("it was ignored")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("checks", [True, False])
def test_a_signal_whose_exception_was_ignored_is_raised_again(checks):
    with Interruptions() as interruptions:
        with pytest.raises(Interruption) as raised, interruptions.heeded():
            ignore(interruptions, checks)
        assert raised.value.number == signal.SIGTERM
        interruptions.check()  # only once


def test_ignored_signals_stay_ignored_and_handlers_come_back():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in HEEDED]
    try:
        with Interruptions() as interruptions, interruptions.heeded():
            send(signal.SIGHUP)
        assert [signal.getsignal(number) for number in HEEDED] == before
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
