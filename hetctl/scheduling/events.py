"""Events of a batch job, the inputs of its scheduling; times are seconds on the clock of the caller."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hetctl.model.exit_reason import ExitReason
from hetctl.model.site import Node
from hetctl.perf.epoch_timeline import PART_SHARE


@dataclass(frozen=True, slots=True)
class JobOpened:
    """The first event of a job.

    Parameters
    ----------
    nodes : tuple of Node
        With all their GPUs.
    deadline_s : float
        When all training has to stop.
    first_round : int
        Number of the first round that the job starts.
    planner_state : Any
        What the planner remembered when the last round before this job started.
    """

    now_s: float
    nodes: tuple[Node, ...]
    deadline_s: float = math.inf
    first_round: int = 0
    planner_state: Any = None

    @property
    def longest_s(self) -> float:
        """Seconds of an epoch, its start-up included, above which it is trained in parts."""
        return PART_SHARE * (self.deadline_s - self.now_s)


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node that the job has from now on."""

    now_s: float
    node: Node


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node that has failed; the ends of steps on it are events of their own, and come first."""

    now_s: float
    node: str


@dataclass(frozen=True, slots=True)
class MemberArrived:
    """A member that needs training from now on."""

    now_s: float
    member: str


@dataclass(frozen=True, slots=True)
class StepStarted:
    """The group of a task is at work, or going to be.

    Parameters
    ----------
    since_s : float
        Its beginning; ahead of now by what the start of a round takes.
    """

    now_s: float
    name: str
    since_s: float


@dataclass(frozen=True, slots=True)
class StepSignalled:
    """A rank of the group of a task has got SIGTERM, and is to leave."""

    now_s: float
    name: str


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The group of a task is no more, and its GPUs are free.

    Parameters
    ----------
    no_room : bool
        Whether a member left by itself, since its next epoch would not fit before the deadline.
    """

    now_s: float
    name: str
    why: ExitReason
    no_room: bool = False


@dataclass(frozen=True, slots=True)
class EpochDone:
    """An epoch of a member in training, with its rate in samples/s."""

    now_s: float
    member: str
    rate: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing but the time."""

    now_s: float


@dataclass(frozen=True, slots=True)
class JobEnding:
    """The job has to end, for a reason that lies outside of its scheduling."""

    now_s: float
    reason: str


Event = (
    JobOpened
    | NodeJoined
    | NodeLost
    | MemberArrived
    | StepStarted
    | StepSignalled
    | StepEnded
    | EpochDone
    | Tick
    | JobEnding
)
