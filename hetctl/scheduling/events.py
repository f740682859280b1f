"""Events of a batch job, the inputs of its scheduling; times are in seconds on the caller's clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hetctl.model.events import ExitReason
from hetctl.model.site import Node
from hetctl.perf.epoch_timeline import PART_SHARE


@dataclass(frozen=True, slots=True)
class JobOpened:
    """First event of a job.

    Parameters
    ----------
    nodes : tuple of Node
        Nodes of the job with all their GPUs.
    deadline_s : float
        Time at which all training has to stop.
    first_round : int
        Number of the first round that the job starts.
    planner_state : Any
        State of the planner when the last round before this job started.
    """

    now_s: float
    nodes: tuple[Node, ...]
    deadline_s: float = math.inf
    first_round: int = 0
    planner_state: Any = None

    @property
    def max_uninterrupted_s(self) -> float:
        """Longest epoch with its start-up, in seconds, that is not trained in parts."""
        return PART_SHARE * (self.deadline_s - self.now_s)


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """Node that becomes part of the job."""

    now_s: float
    node: Node


@dataclass(frozen=True, slots=True)
class NodeLost:
    """Failure of a node; the ends of the tasks on it are events of their own, and come first."""

    now_s: float
    node: str


@dataclass(frozen=True, slots=True)
class MemberArrived:
    """Member that needs training from now on."""

    now_s: float
    member: str


@dataclass(frozen=True, slots=True)
class TaskSignalled:
    """Arrival of SIGTERM at a rank of a task's group: the group has to leave."""

    now_s: float
    name: str


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """End of a task's group; its GPUs are free.

    Parameters
    ----------
    no_room : bool
        True if the member left by itself because its next epoch would not fit before the deadline.
    """

    now_s: float
    name: str
    reason: ExitReason
    no_room: bool = False


@dataclass(frozen=True, slots=True)
class EpochDone:
    """End of an epoch of a member in training, with its rate in samples/s."""

    now_s: float
    member: str
    rate: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Passing of time without any other event."""

    now_s: float


@dataclass(frozen=True, slots=True)
class JobEnding:
    """Request to end the job for a reason outside of its scheduling."""

    now_s: float
    reason: str


SchedulingEvent = (
    JobOpened
    | NodeJoined
    | NodeLost
    | MemberArrived
    | TaskSignalled
    | TaskEnded
    | EpochDone
    | Tick
    | JobEnding
)
