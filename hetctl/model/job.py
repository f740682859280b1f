"""States of a batch job."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hetctl.model.site import Queue

GIVEN_GPUS = "HETCTL_GIVEN_GPUS"
"""Name of the environment variable of a local job that lists its GPUs or slots by number."""


GAVE_WAY = 75
"""Exit code of a script, or a driver, that leaves the run to another job (EX_TEMPFAIL)."""


class JobState(enum.Enum):
    """State of a batch job, with the reason of its end.

    SUBMITTING: the submission has been decided; it is unknown whether the batch system has the job.
    UNKNOWN: the state is unknown at present; the job may be alive. VANISHED: the state is unknown, and the
    job must have ended.
    """

    # Stored before the submit command runs, so that a crash in between leaves a job in doubt, not a lost one.
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
        """True if the job has ended for good; an unknown job may still be alive."""
        return self not in ALIVE


ALIVE = frozenset({JobState.SUBMITTING, JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN})
PROCESSES_ENDED = frozenset(JobState) - ALIVE - {JobState.NODE_FAILED, JobState.VANISHED}


@dataclass(frozen=True)
class JobStatus:
    """State of a job as the batch system reports it.

    Parameters
    ----------
    exit_code : int or None
        Exit code of a job that is over; 128 + n if signal n ended it; None if unknown.
    reason : str
        Reason given by the batch system for waiting or ending, such as ``TERM_RUNLIMIT``.
    failed_nodes : tuple of str
        Nodes whose failure ended the job, as far as known.
    """

    state: JobState
    exit_code: int | None = None
    reason: str = ""
    failed_nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """Batch job of a run: an allocation that holds as many rounds as fit.

    Parameters
    ----------
    name : str
        Unique name of the job at the batch system; it identifies a job whose submission was interrupted.
    batch_id : str
        Id of the job at the batch system; empty while it is SUBMITTING.
    exit_code, reason, failed_nodes
        Same as in `JobStatus`.
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
    reason: str = ""
    failed_nodes: tuple[str, ...] = ()

    @property
    def shown_reason(self) -> str:
        """Reason for the job's state: what the batch system reports beyond the state itself."""
        names = (self.state.value, self.state.name.lower())
        says_more = not any(name.startswith(self.reason.lower()) for name in names)
        return ", ".join(self.failed_nodes) or (self.reason if says_more else "")

    @property
    def left_no_process(self) -> bool:
        """True if the batch system has ended all processes of the job: on a failed node some may live on."""
        return self.state in PROCESSES_ENDED and not self.failed_nodes


@dataclass(frozen=True)
class JobSize:
    """Resources that are requested from the batch system for each job.

    Parameters
    ----------
    grace_s : int
        Seconds before the limit at which trainers write a checkpoint.
    """

    queue: Queue
    gpus: int
    nodes: int
    wall_s: int
    grace_s: int


@dataclass(frozen=True)
class JobSizeOption:
    """Predicted cost of a run with jobs of one size.

    Parameters
    ----------
    makespan_s : float
        Makespan in jobs, without waiting in the queue: the lower bound and the starts of members.
    """

    size: JobSize
    jobs: int
    makespan_s: float
    gpu_hours: float
