"""Commands, the outputs of a batch job's scheduling."""

from __future__ import annotations

from typing import Any

from hetctl.model.hops import Visit
from hetctl.model.plan import Allocation
from hetctl.model.values import dataclass


@dataclass(frozen=True, slots=True)
class Task:
    """Training of a member by a group of ranks, until it has converged or gets a stop command.

    Parameters
    ----------
    allocation : Allocation
        Member of the task and its GPUs.
    visit : Visit or None
        Visit to one partition, which ends the task; None: the task is no visit.
    """

    allocation: Allocation
    visit: Visit | None = None

    @property
    def name(self) -> str:
        """Name of the member."""
        return self.allocation.member


@dataclass(frozen=True, slots=True)
class Start:
    """Command to start tasks on free GPUs, as one round or, if they are visits, in the round of all visits.

    Parameters
    ----------
    predicted_s : float
        Predicted time until the round ends or is stopped, in seconds.
    planner_state : Any
        State that the planner keeps, for the next job.
    """

    round: int
    tasks: tuple[Task, ...]
    predicted_s: float = 0.0
    planner_state: Any = None


@dataclass(frozen=True, slots=True)
class Stop:
    """Command to let one or all members of a round write checkpoints and exit.

    Parameters
    ----------
    member : str or None
        Member to stop; None stops all members of the round.
    at_once : bool
        True if the grace period for exiting begins now, not at the member's next expected poll.
    """

    round: int
    reason: str
    member: str | None = None
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class EndRound:
    """Command to close a round in which no task runs any more."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class ScheduleTick:
    """Command to send a `Tick` at time `at_s` if no other event comes before."""

    at_s: float


@dataclass(frozen=True, slots=True)
class EndJob:
    """Command to end the job; no task runs any more.

    Parameters
    ----------
    refused : tuple of (str, float) or None
        A member that got no GPUs, and the seconds that its shortest task needs.
    """

    reason: str
    refused: tuple[str, float] | None = None


Command = Start | Stop | EndRound | ScheduleTick | EndJob
