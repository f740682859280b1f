"""What an examination of a site found."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CheckStatus(enum.Enum):
    """How a check came out; what was not checked is no finding."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class FaultDomain(enum.Enum):
    """Whose a failure is: the user's own files and folders, or the batch system's."""

    SITE = "site"
    BATCH_SYSTEM = "batch-system"


@dataclass(frozen=True)
class CheckResult:
    """One check, and what it saw.

    Parameters
    ----------
    fix : str
        What to do about a warning or failure.
    """

    check: str
    outcome: CheckStatus
    found: str
    fix: str = ""
    blame: FaultDomain = FaultDomain.SITE


def first_failure(findings: tuple[CheckResult, ...]) -> CheckResult | None:
    """Return the first failure: checks go from causes to consequences."""
    return next((finding for finding in findings if finding.outcome is CheckStatus.FAILED), None)
