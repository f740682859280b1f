"""The few ways in which hetctl can refuse or fail, each with its exit code."""

from __future__ import annotations


class HetctlError(Exception):
    """A failure that a user can act on.

    Parameters
    ----------
    message : str
        The value, the rule it breaks, and where.
    hint : str
        What to do next; empty when the message already says it.
    """

    exit_code = 1
    kind = "internal"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadInputError(HetctlError):
    """Something that a person wrote is wrong; nothing was written or submitted."""

    exit_code = 2
    kind = "bad-input"


class InfeasibleError(HetctlError):
    """The input is well formed, but no plan satisfies it."""

    exit_code = 3
    kind = "infeasible"


class BatchSystemError(HetctlError):
    """The batch system cannot be reached, or refused the request."""

    exit_code = 4
    kind = "batch-system"


class MembersFailedError(HetctlError):
    """The work ended, but some networks did not get through it."""

    exit_code = 5
    kind = "members-failed"


class LockedError(HetctlError):
    """Another process holds the catalog or the run."""

    exit_code = 6
    kind = "locked"


class InterruptedCommandError(HetctlError):
    """A signal ended the command before its work was done.

    Parameters
    ----------
    number : int
        Of the signal; the exit code is 128 more.
    """

    exit_code = 130
    kind = "interrupted"

    def __init__(self, number: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.exit_code = 128 + number
