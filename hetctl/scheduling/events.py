"""Events of a batch job, the inputs of its scheduling; times are in seconds on the caller's clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hetctl.model.ensemble import StopRule
from hetctl.model.events import ExitReason
from hetctl.model.site import Node
from hetctl.model.values import dataclass
from hetctl.perf.epoch_timeline import MAX_UNINTERRUPTED_SHARE


@dataclass(frozen=True, slots=True)
class SchedulingEvent:
    """Event at a time."""

    now_s: float


@dataclass(frozen=True, slots=True)
class JobOpened(SchedulingEvent):
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

    nodes: tuple[Node, ...]
    deadline_s: float = math.inf
    first_round: int = 0
    planner_state: Any = None

    @property
    def max_uninterrupted_s(self) -> float:
        """Longest epoch that is trained in one piece, start-up included, in seconds."""
        return MAX_UNINTERRUPTED_SHARE * (self.deadline_s - self.now_s)


@dataclass(frozen=True, slots=True)
class NodeJoined(SchedulingEvent):
    """Node that becomes part of the job."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeLost(SchedulingEvent):
    """Failure of a node; the ends of its tasks are events of their own and come first."""

    node: str


@dataclass(frozen=True, slots=True)
class MemberArrived(SchedulingEvent):
    """Member that needs training from now on."""

    member: str


@dataclass(frozen=True, slots=True)
class MemberWithdrawn(SchedulingEvent):
    """Request to stop training a member: it is paused or cancelled."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class MembersEdited(SchedulingEvent):
    """Edited stop rules of members, by name; of members that train in groups, each task heeds its own."""

    rules: Mapping[str, StopRule]


@dataclass(frozen=True, slots=True)
class TaskSignalled(SchedulingEvent):
    """Arrival of SIGTERM at a rank of a task's group: the group has to leave."""

    name: str


@dataclass(frozen=True, slots=True)
class TaskEnded(SchedulingEvent):
    """End of a task's group; its GPUs are free.

    Parameters
    ----------
    no_room : bool
        True if the member left by itself because its next epoch would not fit before the deadline.
    alone : bool
        True if the member cannot train fused with others.
    """

    name: str
    reason: ExitReason
    no_room: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class RateSeen(SchedulingEvent):
    """Rate of a member in training, in samples/s: timed within an epoch, or that of its last one."""

    member: str
    rate: float


@dataclass(frozen=True, slots=True)
class Tick(SchedulingEvent):
    """Passing of time without any other event."""


@dataclass(frozen=True, slots=True)
class JobEnding(SchedulingEvent):
    """Request to end the job for a reason outside of its scheduling."""

    reason: str
