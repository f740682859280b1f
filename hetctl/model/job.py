"""Jobs of runs, and the states of jobs and runs with the transitions between them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetctl.model.site import Queue
from hetctl.model.values import dataclass

GIVEN_GPUS = "HETCTL_GIVEN_GPUS"
"""Name of the environment variable of a local job that lists its GPUs or slots by number."""

TRAIN, PROFILE, PROBE = "train", "profile", "probe"
"""Modes of a job: it trains members of a run, measures points of a profile, or tests a site."""

SUPERSEDED_EXIT = 75
"""Exit code of a script or driver that leaves the run to another job (EX_TEMPFAIL)."""


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
        """Reason for the job's state that the batch system reports beyond the state itself."""
        names = (self.state.value, self.state.name.lower())
        says_more = not any(name.startswith(self.reason.lower()) for name in names)
        return ", ".join(self.failed_nodes) or (self.reason if says_more else "")

    @property
    def left_no_process(self) -> bool:
        """True if the batch system has ended all processes; on a failed node some may live on."""
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
        Makespan without waiting in the queue: the lower bound and the starts of members.
    """

    size: JobSize
    jobs: int
    makespan_s: float
    gpu_hours: float

    @property
    def node_hours(self) -> float:
        """Node-hours of all jobs, without start and end."""
        return self.size.nodes * self.makespan_s / 3600


QUEUED, IN_DOUBT, RUNNING, BETWEEN_JOBS = "queued", "in-doubt", "running", "between-jobs"
CANCELLED, STOPPED, STALLED = "cancelled", "stopped", "stalled"
FINISHED, FAILED = "finished", "failed"

UNDER_WAY = (QUEUED, IN_DOUBT, RUNNING, BETWEEN_JOBS)
"""States in which a run goes on; the catalog has one of QUEUED and RUNNING for all four."""
RESUMABLE = (CANCELLED, STOPPED, STALLED)
"""States of a run that has no jobs until `hetctl submit` continues it."""
ENDED = (FINISHED, FAILED)
"""States of a run without work left; new input may give it some."""


class RunReason(enum.Enum):
    """Events that change the state of a run; the value describes one in the documentation."""

    BEGUN = "`hetctl submit` enters it into the catalog"
    REFUSED = "the batch system refuses its first job: the entry is removed"
    SUBMITTED = "a job is submitted, or found after a submission that was cut short"
    JOB_ALIVE = "`hetctl advance` finds a job of it waiting or running"
    CONVERGED = "every member has converged"
    MEMBERS_FAILED = "no member is left to train, and some failed"
    BUDGET = "a budget is used up, or its queue permits no chain of jobs"
    NO_PROGRESS = "the disk is full, or two jobs in a row got nothing done"
    PAUSED = "no member is left to train but paused ones"
    CANCELLED = "`hetctl cancel`"
    CONTINUED = "`hetctl submit` continues it"
    DRIVER_STARTED = "the driver of a job has started"
    JOB_WAITS = "a job waits, or its driver has not started yet"
    JOB_IN_SUBMISSION = "its job is being submitted, or that was cut short"
    REMOVED = "`hetctl rm` removes it"
    NO_JOB = "its jobs have ended, and the next one is not submitted yet"


# Each row: the states before, the reason, the state after; None stands for what the catalog does not have.
RUN_TRANSITIONS: Sequence[tuple[Sequence[str | None], RunReason, str | None]] = (
    ((None,), RunReason.BEGUN, QUEUED),
    ((QUEUED,), RunReason.REFUSED, None),
    (UNDER_WAY, RunReason.SUBMITTED, QUEUED),
    (UNDER_WAY, RunReason.JOB_ALIVE, RUNNING),
    (UNDER_WAY, RunReason.CONVERGED, FINISHED),
    (UNDER_WAY, RunReason.MEMBERS_FAILED, FAILED),
    (UNDER_WAY, RunReason.BUDGET, STOPPED),
    (UNDER_WAY, RunReason.NO_PROGRESS, STALLED),
    (UNDER_WAY, RunReason.PAUSED, STOPPED),
    ((*UNDER_WAY, *RESUMABLE), RunReason.CANCELLED, CANCELLED),
    ((*UNDER_WAY, *RESUMABLE, *ENDED), RunReason.CONTINUED, QUEUED),
    ((*RESUMABLE, *ENDED), RunReason.REMOVED, None),
    (UNDER_WAY, RunReason.DRIVER_STARTED, RUNNING),
    (UNDER_WAY, RunReason.JOB_WAITS, QUEUED),
    (UNDER_WAY, RunReason.JOB_IN_SUBMISSION, IN_DOUBT),
    (UNDER_WAY, RunReason.NO_JOB, BETWEEN_JOBS),
)

_SUBMITTED = (JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN)
JOB_TRANSITIONS: Sequence[tuple[Sequence[JobState | None], str, JobState | None]] = (
    ((None,), "it is entered into the catalog before it is submitted", JobState.SUBMITTING),
    ((JobState.SUBMITTING,), "the batch system refuses it, or does not have it", None),
    ((JobState.SUBMITTING,), "the batch system has it", JobState.PENDING),
    # A running job waits again after the batch system has requeued it.
    ((JobState.RUNNING, JobState.UNKNOWN), "it waits, or waits again", JobState.PENDING),
    ((JobState.PENDING, JobState.UNKNOWN), "it has started", JobState.RUNNING),
    (
        (JobState.PENDING, JobState.RUNNING),
        "the batch system no longer lists it, and its time is not over",
        JobState.UNKNOWN,
    ),
    (
        (JobState.SUBMITTING, *_SUBMITTED),
        "it ended with exit code 0, or its driver has reported its end",
        JobState.FINISHED,
    ),
    (_SUBMITTED, "it ended with another exit code", JobState.FAILED),
    (_SUBMITTED, "it used more memory than it had", JobState.OUT_OF_MEMORY),
    (_SUBMITTED, "it reached its wall-clock limit", JobState.TIMEOUT),
    (_SUBMITTED, "the batch system took its nodes for another job", JobState.PREEMPTED),
    (_SUBMITTED, "one of its nodes failed", JobState.NODE_FAILED),
    (_SUBMITTED, "it was cancelled", JobState.CANCELLED),
    (_SUBMITTED, "the batch system no longer lists it, and its time is over", JobState.VANISHED),
)

RUN_AFTER = {(state, why): after for before, why, after in RUN_TRANSITIONS for state in before}
JOB_REASONS = {(state, after): why for before, why, after in JOB_TRANSITIONS for state in before}


def run_after(before: str | None, reason: RunReason) -> str:
    """Return the state of a run after a transition.

    Raises
    ------
    ValueError
        If the table has no such transition to a state.
    """
    after = RUN_AFTER.get((before, reason))
    if after is None:
        raise ValueError(f"a run that is {before or 'new'} has no transition for: {reason.value}")
    return after


def check_run_removal(state: str, reason: RunReason) -> None:
    """Raise ValueError unless a run in this state may be removed from the catalog for a reason."""
    if RUN_AFTER.get((state, reason), state) is not None:
        raise ValueError(f"a run that is {state} is not to be removed")


def check_job_removal(state: JobState) -> None:
    """Raise ValueError unless a job in this state may be removed from the catalog."""
    if (state, None) not in JOB_REASONS:
        raise ValueError(f"a job that is {state.value} is not to be removed")


def moved(job: Job, state: JobState, **fields: Any) -> Job:
    """Return a job in its next state, with new values of `fields`; the same state is no transition.

    Raises
    ------
    ValueError
        If the table has no such transition.
    """
    # A job is queried as long as it is alive, and so reports one state repeatedly.
    if state is not job.state and (job.state, state) not in JOB_REASONS:
        raise ValueError(f"job {job.number} is {job.state.value} and cannot become {state.value}")
    return replace(job, state=state, **fields)
