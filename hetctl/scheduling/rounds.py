"""Rounds that are open, and the tasks in them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetctl.scheduling.commands import Task

DEADLINE = "deadline"
SIGNAL = "signal"
"""Reason of a member to leave of which a rank has got SIGTERM."""


@dataclass
class Running:
    """A task on its GPUs.

    Parameters
    ----------
    rate : float
        Samples/s, as the planner was told last.
    """

    task: Task
    round: int
    rate: float
    since_s: float
    leaving: bool = False


@dataclass
class OpenRound:
    """Tasks that started together.

    Parameters
    ----------
    allocated : int
        GPUs that it was given.
    held : dict of str to int
        GPUs of members that have neither converged nor failed.
    running : set of str
        Tasks that have not ended.
    reasons : dict of str to str
        Of members that were told to leave each for itself.
    released : bool
        Whether some have ended since the stop rule was looked at.
    """

    allocated: int
    held: dict[str, int]
    running: set[str]
    reasons: dict[str, str] = field(default_factory=dict)
    stopped_by: str | None = None
    failed: bool = False
    released: bool = False

    @property
    def ended_by(self) -> str:
        """Reason of its end: trainers see the deadline for themselves."""
        if self.stopped_by or self.failed:
            return self.stopped_by or "failed"
        reasons = [self.reasons.get(name, DEADLINE) for name in self.held]
        return reasons[-1] if reasons else "converged"
