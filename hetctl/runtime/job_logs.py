"""Output that tolerates a full disk."""

from __future__ import annotations

import contextlib
import errno
import os

from hetctl.model.exit_reason import ExitReason

# EDQUOT: the quota is used up. EFBIG: the limit of a file's size is reached (write(2), RLIMIT_FSIZE).
DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def log_line(text: str) -> None:
    """Print a line to the log; errors of the disk are ignored."""
    with contextlib.suppress(OSError):
        # print() would keep the text in its buffer after ENOSPC, and fail with it
        # again at the next call or at the exit.
        os.writev(1, [f"{text}\n".encode()])


def disk_error_reason(error: OSError) -> str:
    """Return the reason of a job's end for an error of the disk."""
    return (
        ExitReason.DISK_FULL.value
        if error.errno in DISK_FULL_ERRORS
        else f"{error.strerror}: {error.filename}"
    )
