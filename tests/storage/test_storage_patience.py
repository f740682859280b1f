"""Errors that pass by themselves are waited for, within limits."""

from __future__ import annotations

import errno

import pytest

from hetctl.model.errors import is_transient
from hetctl.storage.patience import LONGEST_PAUSE_S, Patience


class Clock:
    def __init__(self):
        self.now_s, self.pauses, self.beats = 0.0, [], 0

    def patience(self, limit_s):
        return Patience(limit_s, self.beat, lambda: self.now_s, self.sleep)

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now_s += seconds

    def beat(self):
        self.beats += 1


def failing(times, number):
    left = [number] * times

    def function():
        if left:
            raise OSError(left.pop(), "no answer", "file")
        return "done"

    return function


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ESHUTDOWN, errno.EMFILE, errno.EROFS])
def test_an_operation_is_repeated_until_the_disk_answers(number):
    clock = Clock()
    assert clock.patience(300.0).call(failing(12, number)) == "done"
    assert clock.pauses == sorted(clock.pauses)
    assert clock.pauses[-1] == LONGEST_PAUSE_S
    assert clock.beats == 12


def test_a_disk_that_never_answers_is_given_up():
    clock = Clock()
    with pytest.raises(OSError, match="no answer"):
        clock.patience(60.0).call(failing(1000, errno.ESTALE))
    assert 60.0 <= clock.now_s <= 60.0 + LONGEST_PAUSE_S


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.EACCES])
def test_errors_about_a_file_are_raised_at_once(number):
    clock = Clock()
    with pytest.raises(OSError, match="no answer"):
        clock.patience(300.0).call(failing(1, number))
    assert not clock.pauses
    assert not is_transient(OSError(number, ""))
