"""Writing that outlives a full disk."""

from __future__ import annotations

import contextlib
import errno
import os

from hetctl.model.exit_reason import Why

DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def say(text: str) -> None:
    """Print a line to the log, if the disk lets it."""
    with contextlib.suppress(OSError):
        os.writev(1, [f"{text}\n".encode()])


def in_words(error: OSError) -> str:
    """Say what is wrong with the disk, as the reason for the end of a job."""
    return Why.DISK_FULL.value if error.errno in DISK_FULL_ERRORS else f"{error.strerror}: {error.filename}"
