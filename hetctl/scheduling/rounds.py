"""Open rounds and the tasks in them; the stop rule and the predicted duration of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetctl.scheduling.commands import Task

DEADLINE = "deadline"
SIGNAL = "signal"
"""Reason for stopping a member after one of its ranks got SIGTERM."""


@dataclass
class RunningTask:
    """Task in execution.

    Parameters
    ----------
    rate : float
        Rate that the planner last knew, in samples/s.
    since_s : float
        Start of its group.
    """

    task: Task
    round: int
    rate: float
    since_s: float
    stopping: bool = False


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
        # Members without a reason left by their own clocks, before the driver stopped anything.
        reasons = [self.reasons.get(name, DEADLINE) for name in self.held]
        return reasons[-1] if reasons else "converged"


def should_stop(
    active: Mapping[str, int],
    allocated: int,
    alpha: float,
    *,
    waiting: bool,
    max_gpus: Mapping[str, int],
) -> bool:
    """Return true if all training of a round has to stop (FLEET, section 4.3.2, "Training").

    The paper stops a flotilla as soon as fewer than alpha * M GPUs are not released. There are two
    differences. M is the number of GPUs given to this round, not the whole cluster: a round that cannot
    fill the cluster would otherwise stop at once. And the round continues if a new plan could change
    nothing, because no member waits and each one holds all the GPUs it may.

    Parameters
    ----------
    active : mapping of str to int
        GPUs by member, for the members of the round that have neither converged nor failed; one that
        left because its next epoch would not fit the wall-clock limit has released nothing.
    allocated : int
        GPUs that the round was given when it started.
    waiting : bool
        True if members outside the round still need training.
    max_gpus : mapping of str to int
        Largest number of GPUs that each active member may hold.
    """
    if not active or sum(active.values()) >= alpha * allocated:
        return False
    return waiting or any(gpus < max_gpus[member] for member, gpus in active.items())


def round_s(tasks: Sequence[tuple[float, int]], alpha: float) -> float:
    """Return the seconds until less than the share `alpha` of a round's GPUs is active.

    Parameters
    ----------
    tasks : sequence of (seconds, GPUs)
        Seconds and GPUs of each member's task.
    """
    active = sum(gpus for _, gpus in tasks)
    least = alpha * active
    for seconds, gpus in sorted(tasks):
        active -= gpus
        if active < least or active == 0:
            return seconds
    return 0.0
