"""Results of the checks of a site."""

from __future__ import annotations

import enum

from hetctl.model.values import dataclass


class CheckStatus(enum.Enum):
    """Result of a check; a check that was not made is not reported."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class FaultDomain(enum.Enum):
    """Cause of a failure: the user's own files and folders, or the batch system."""

    SITE = "site"
    BATCH_SYSTEM = "batch-system"


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Parameters
    ----------
    hint : str
        Action that resolves a warning or failure.
    """

    name: str
    status: CheckStatus
    message: str
    hint: str = ""
    fault_domain: FaultDomain = FaultDomain.SITE


def first_failure(checks: tuple[CheckResult, ...]) -> CheckResult | None:
    """Return the first failure: causes are checked before their consequences."""
    return next((check for check in checks if check.status is CheckStatus.FAILED), None)
