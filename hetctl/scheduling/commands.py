"""Commands, the outputs of a batch job's scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetctl.model.plan import Allocation

TRAIN = "train"
"""The task of training a member until it has converged or is told to leave."""


@dataclass(frozen=True, slots=True)
class Task:
    """Work of a group of ranks on its GPUs.

    Parameters
    ----------
    allocation : Allocation
        Whose task it is, and on which GPUs.
    kind : str
        `TRAIN`; tasks of other kinds are started, stopped and ended by the same commands and events.
    """

    allocation: Allocation
    kind: str = TRAIN

    @property
    def name(self) -> str:
        """The member's name."""
        return self.allocation.member


@dataclass(frozen=True, slots=True)
class Start:
    """Start tasks as one round, on GPUs that are free.

    Parameters
    ----------
    predicted_s : float
        Until the round ends or is stopped.
    planner_state : Any
        What the planner remembers, for the job after this one.
    """

    round: int
    tasks: tuple[Task, ...]
    predicted_s: float
    planner_state: Any


@dataclass(frozen=True, slots=True)
class Stop:
    """Have a member of a round, or all of it, write checkpoints and leave.

    Parameters
    ----------
    member : str or None
        None: all members of the round.
    at_once : bool
        Whether the grace for leaving counts from now, and not from when a member can be expected to look.
    """

    round: int
    reason: str
    member: str | None = None
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class EndRound:
    """Close a round that nobody is in any more."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Send a `Tick` at that time, if nothing else happens before."""

    at_s: float


@dataclass(frozen=True, slots=True)
class EndJob:
    """End the job; nothing is under way any more.

    Parameters
    ----------
    refused : tuple of (str, float) or None
        A member that could not be given any GPUs, since it would have needed so many seconds.
    """

    reason: str
    refused: tuple[str, float] | None = None


Command = Start | Stop | EndRound | AskAgain | EndJob
