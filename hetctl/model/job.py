"""The states of a batch job."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hetctl.model.site import Queue

GIVEN_GPUS = "HETCTL_GIVEN_GPUS"
"""Names the variable of a local job that lists its GPUs or slots by number."""


class JobState(enum.Enum):
    """Where a batch job stands, and why it ended.

    SUBMITTING: it was decided to submit it, and it is not known whether the batch system has it.
    UNKNOWN: nobody can tell now; it may be alive. VANISHED: nobody can tell, and it must be gone.
    """

    SUBMITTING = "submitting"
    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    OUT_OF_MEMORY = "out-of-memory"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAILED = "node-failed"
    CANCELLED = "cancelled"
    VANISHED = "vanished"
    UNKNOWN = "unknown"

    @property
    def over(self) -> bool:
        """Whether the job will do nothing more; an unknown job may still be alive."""
        return self not in ALIVE


ALIVE = frozenset({JobState.SUBMITTING, JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN})


@dataclass(frozen=True)
class JobStatus:
    """What a batch system says of a job.

    Parameters
    ----------
    exit_code : int or None
        Of a job that is over: 128 + n if signal n ended it; None if nobody knows.
    detail : str
        The batch system's own words for why it waits or has ended, such as ``TERM_RUNLIMIT``.
    failed_nodes : tuple of str
        Nodes whose failure ended it, as far as they are known.
    """

    state: JobState
    exit_code: int | None = None
    detail: str = ""
    failed_nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One batch job of a run: an allocation that holds as many rounds as fit.

    Parameters
    ----------
    name : str
        Unique, and the job's name at the batch system: by it a job is found whose submission was
        cut short.
    batch_id : str
        The batch system's number of it; empty as long as it is SUBMITTING.
    exit_code, detail, failed_nodes
        As in `JobStatus`.
    """

    number: int
    name: str
    batch_id: str
    state: JobState
    nodes: int
    wall_s: int
    submitted_at: float
    ended_at: float | None = None
    exit_code: int | None = None
    detail: str = ""
    failed_nodes: tuple[str, ...] = ()

    @property
    def why(self) -> str:
        """Why the job is in its state: what the batch system says beyond the state itself."""
        names = (self.state.value, self.state.name.lower())
        says_more = not any(name.startswith(self.detail.lower()) for name in names)
        return ", ".join(self.failed_nodes) or (self.detail if says_more else "")


@dataclass(frozen=True)
class JobSize:
    """What is asked of the batch system for each job.

    Parameters
    ----------
    grace_s : int
        Trainers checkpoint this long before the limit.
    """

    queue: Queue
    gpus: int
    nodes: int
    wall_s: int
    grace_s: int


@dataclass(frozen=True)
class JobSizeOption:
    """What a run would come to with jobs of one size.

    Parameters
    ----------
    makespan_s : float
        In jobs, without waiting in the queue: lower bound and starts of members.
    """

    size: JobSize
    jobs: int
    makespan_s: float
    gpu_hours: float
