"""Errors of hetctl, each with its exit code, and transient errors of disks."""

from __future__ import annotations

import errno


class HetctlError(Exception):
    """A failure that a user can act on.

    Parameters
    ----------
    message : str
        Value, rule that it breaks, and place.
    hint : str
        Next step for the user; empty if the message already gives it.
    """

    exit_code = 1
    kind = "internal"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadInputError(HetctlError):
    """Wrong user input; nothing was written or submitted."""

    exit_code = 2
    kind = "bad-input"


class TransientInputError(BadInputError):
    """Input that another try may find in order: files, packages or interfaces of a node, samples."""


class DamagedFileError(BadInputError):
    """Damaged file that hetctl wrote."""


class InfeasibleError(HetctlError):
    """Well-formed input that no plan satisfies."""

    exit_code = 3
    kind = "infeasible"


class BatchSystemError(HetctlError):
    """Batch system that cannot be reached, or that refused the request."""

    exit_code = 4
    kind = "batch-system"


class MembersFailedError(HetctlError):
    """End of a run in which some networks failed."""

    exit_code = 5
    kind = "members-failed"


class LockedError(HetctlError):
    """Catalog or run that another process holds."""

    exit_code = 6
    kind = "locked"


class RunStalledError(HetctlError):
    """Run that another job would not advance: its last jobs got nothing done, or the disk is full."""

    exit_code = 7
    kind = "stalled"


class DiskError(HetctlError):
    """File system that does not answer at present."""

    exit_code = 8
    kind = "disk"


class InterruptedCommandError(HetctlError):
    """End of a command by a signal before its work was done.

    Parameters
    ----------
    number : int
        Number of the signal; the exit code is 128 more.
    """

    exit_code = 130
    kind = "interrupted"

    def __init__(self, number: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.exit_code = 128 + number


# EDQUOT: the quota is used up. EFBIG: the limit of a file's size is reached (write(2), RLIMIT_FSIZE).
DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

SERVER_ERRORS = frozenset({errno.EIO, errno.ESTALE, errno.ESHUTDOWN})
"""Errors of file operations while Lustre evicts a client, or a server of Lustre or NFS fails over."""

# ENOTCONN, ETIMEDOUT: a server does not answer. The next three: a node has no free descriptors for a moment.
# EROFS: a file system was remounted after an error, and awaits repair.
TRANSIENT_ERRORS = SERVER_ERRORS | {
    *(errno.ENOTCONN, errno.ETIMEDOUT),
    *(errno.EMFILE, errno.ENFILE, errno.EAGAIN),
    errno.EROFS,
}
"""Errors of file operations that say nothing about the file: the same operation may succeed later."""


def is_transient(error: BaseException) -> bool:
    """Return true for an error of the file system that may pass."""
    return isinstance(error, OSError) and error.errno in TRANSIENT_ERRORS
