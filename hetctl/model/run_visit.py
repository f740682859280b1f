"""Visits of members that hop, and their plans, as recorded in a run's events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DONE, LOST, UNDONE = "done", "lost", "undone"


@dataclass(frozen=True)
class RunVisit:
    """Training or evaluation of a member on one partition at one worker.

    Parameters
    ----------
    number : int
        Number of the start in the run.
    epoch : int
        Training epoch, from 1; the evaluation that follows it has the same number.
    worker : str
        Node and GPUs, as `hetctl.model.hop_worker` names them.
    began_at, ended_at : float
        Seconds since the epoch.
    state : str
        ``done``; ``lost`` if it ended without a result; ``undone`` if its result was lost later.
    round : int
        Index of the round of its job.
    waited_s, hop_s : float
        Seconds for which it waited for the member's state, and of the transfer of the state between nodes.
    bytes : int
        Bytes that were transferred; 0 within a node.
    loss : float or None
        Mean training loss.
    reason : str
        Reason why it was lost.
    """

    member: str
    number: int
    epoch: int
    evaluates: bool
    partition: int
    worker: str
    began_at: float
    ended_at: float
    state: str = DONE
    round: int = 0
    waited_s: float = 0.0
    hop_s: float = 0.0
    bytes: int = 0
    samples: int = 0
    loss: float | None = None
    reason: str = ""

    @property
    def hopper_epoch(self) -> int:
        """Epoch of the hopper's state machine: from 0, even ones train and odd ones evaluate."""
        return 2 * (self.epoch - 1) + self.evaluates


@dataclass(frozen=True)
class RunHopPlan:
    """Plan of visits that a driver made.

    Parameters
    ----------
    time : float
        Time of the plan in seconds since the epoch.
    predicted_s, lower_bound_s : float
        Predicted time of the planned visits, and its lower bound, in seconds from then.
    workers : mapping of str to tuple of str
        Partitions by worker.
    reason : str
        Change that required it.
    """

    time: float
    round: int
    scheduler: str
    predicted_s: float
    lower_bound_s: float
    workers: Mapping[str, tuple[str, ...]]
    reason: str
