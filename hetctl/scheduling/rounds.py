"""Open rounds and the tasks in them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetctl.scheduling.commands import Task

DEADLINE = "deadline"
SIGNAL = "signal"
"""Reason for stopping a member after one of its ranks got SIGTERM."""


@dataclass
class Running:
    """Task in execution.

    Parameters
    ----------
    rate : float
        Rate that the planner last knew, in samples/s.
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
        GPUs that the round was given.
    held : dict of str to int
        GPUs of members that have neither converged nor failed.
    running : set of str
        Names of the tasks that have not ended.
    reasons : dict of str to str
        Reasons of members that were stopped one by one.
    released : bool
        True if tasks have ended since the stop rule was last evaluated.
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
        """Reason of the end of the round; trainers notice the deadline themselves."""
        if self.stopped_by or self.failed:
            return self.stopped_by or "failed"
        reasons = [self.reasons.get(name, DEADLINE) for name in self.held]
        return reasons[-1] if reasons else "converged"
