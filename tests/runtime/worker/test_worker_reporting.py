"""Reports of failures, also onto a full disk."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from hetctl.model.errors import BadInputError
from hetctl.model.events import EXIT_CODES, ExitReason
from hetctl.runtime.worker.reporting import report_failure
from hetctl.storage.patience import Patience


class FullLog:
    """A log on a disk without room."""

    def write(self, _text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self):
        self.write("")


class Events(list):
    patience = Patience()

    def write(self, kind, **data):
        self.append((kind, data["reason"]))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "full"), ExitReason.DISK_FULL),
        (OSError(errno.ESTALE, "Stale file handle"), ExitReason.DISK_ERROR),
        (TimeoutError(errno.ETIMEDOUT, "no answer of a socket"), ExitReason.PROGRAM_ERROR),
        (BadInputError("wrong"), ExitReason.BAD_INPUT),
    ],
)
def test_a_full_log_does_not_change_the_reason(monkeypatch, error, reason):
    monkeypatch.setattr(sys, "stderr", FullLog())
    events = Events()
    assert report_failure(error, events) == EXIT_CODES[reason]
    assert events == [("failed", reason.value)]
