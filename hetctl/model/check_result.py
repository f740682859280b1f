"""What an examination of a site found."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Outcome(enum.Enum):
    """How a check came out; what was not checked is no finding."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Blame(enum.Enum):
    """Whose a failure is: the user's own files and folders, or the batch system's."""

    SITE = "site"
    BATCH_SYSTEM = "batch-system"


@dataclass(frozen=True)
class Finding:
    """One check, and what it saw.

    Parameters
    ----------
    fix : str
        What to do about a warning or failure.
    """

    check: str
    outcome: Outcome
    found: str
    fix: str = ""
    blame: Blame = Blame.SITE


def first_failure(findings: tuple[Finding, ...]) -> Finding | None:
    """Return the first failure: checks go from causes to consequences."""
    return next((finding for finding in findings if finding.outcome is Outcome.FAILED), None)
