"""The states of a batch job."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class JobState(enum.Enum):
    """Where a batch job stands, and why it ended."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    OUT_OF_MEMORY = "out-of-memory"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAILED = "node-failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def over(self) -> bool:
        """Whether the job will do nothing more; an unknown job may still be alive."""
        return self not in (JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN)


@dataclass(frozen=True)
class Job:
    """One batch job of a run: an allocation that holds as many rounds as fit.

    Parameters
    ----------
    first_round : int
        Index of the round that the job starts with.
    """

    number: int
    first_round: int
    batch_id: str
    state: JobState
    nodes: int
    wall_s: int
    submitted_at: float
    ended_at: float | None = None
