"""Effect of the ends of jobs on their run: continue, continue on other nodes, or stop."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from hetctl.model.events import Event
from hetctl.model.exit_reason import ExitReason
from hetctl.model.job import GAVE_WAY, Job, JobState
from hetctl.model.run import RunSpec, Usage
from hetctl.model.run_states import RunReason
from hetctl.model.training_progress import Progress
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_state import RunState, state_in

ALL_CONVERGED = "every member has converged"

IDLE_JOBS = 2
"""Number of consecutive jobs without progress, although it was possible, after which a run stops."""
NODE_FAILURES = 3
"""Number of consecutive failures of nodes that do not count as jobs without progress."""

FREE = frozenset({JobState.PREEMPTED, JobState.CANCELLED})
"""Ends of jobs without a fault of the run; they predict nothing about the next job."""


def reason_to_end(spec: RunSpec, folder: RunFolder, jobs: Sequence[Job]) -> tuple[RunReason, str] | None:
    """Return why a run ends after its jobs, with a text for the user; None if it needs another job."""
    state = state_in(folder, spec)
    if not state.has_work:
        return _outcome(state.progress, state.facts.search_ended)
    budget, used = spec.budget, used_until_now(state, jobs)
    if limit := budget.exceeded_by_jobs(len(jobs) - spec.earlier_jobs) or budget.exceeded(used):
        return RunReason.BUDGET, limit
    trouble = _trouble(folder, [job for job in jobs if job.number >= spec.earlier_jobs], state)
    return (RunReason.NO_PROGRESS, trouble) if trouble else None


def used_until_now(state: RunState, jobs: Iterable[Job]) -> Usage:
    """Return the resources used by a run; tasks whose driver was killed have ended with its last events."""
    last = state.facts.last
    goes_on = last is None or any(not job.state.over for job in jobs)
    return state.used(time.time() if last is None or goes_on else last.time)


def _outcome(progress: Mapping[str, Progress], search_ended: str | None) -> tuple[RunReason, str]:
    """Return how a run without work has ended; a search goes on without trials that fail."""
    trials = {name for name, member in progress.items() if member.asked}
    lost = {name for name in trials if progress[name].failed}
    failed = [name for name, member in progress.items() if member.failed and name not in trials]
    if failed or (trials and lost == trials):
        return RunReason.MEMBERS_FAILED, f"{len(failed) or len(lost)} of {len(progress)} members failed"
    return RunReason.CONVERGED, f"the search has ended: {search_ended}" if search_ended else ALL_CONVERGED


def _trouble(folder: RunFolder, jobs: Sequence[Job], state: RunState) -> str:
    """Return why another job would fail as these did; empty if it may succeed."""
    numbers = {job.number for job in jobs}
    reasons = reasons_of_jobs(event for event in state.facts.jobs if event.record.job in numbers)
    # A slice, since there may be no ended job.
    if reasons[-1:] == [ExitReason.DISK_FULL.value]:
        return "the disk is full: free some space"
    idle = idle_jobs([job for job in jobs if job.state.over], state.reached_at)
    if len(idle) < IDLE_JOBS:
        return ""
    # Without their states: the last one still runs this, and the batch system does not know its end yet.
    return f"the last {len(idle)} jobs got nothing done: see {folder.job(idle[-1].number).log}"


def reasons_of_jobs(events: Iterable[Event]) -> list[str]:
    """Return the reported reasons for the ends of the run's jobs, in order of time."""
    ended = [event for event in events if event.kind == "job_ended"]
    return [event.record.reason for event in sorted(ended, key=lambda event: event.time)]


def idle_jobs(jobs: Sequence[Job], reached_at: float) -> list[Job]:
    """Return the jobs since the last progress that count as jobs without progress.

    Parameters
    ----------
    jobs : sequence of Job
        Jobs of one run, by number; all are over.
    reached_at : float
        Time of the last progress, as in `RunState`.
    """
    # With --chain a job is submitted before the previous one makes progress, which then clears both.
    idle = [job for job in jobs if job.submitted_at >= reached_at]
    failed = [job for job in idle if job.state is JobState.NODE_FAILED]
    forgiven = FREE if len(failed) > NODE_FAILURES else FREE | {JobState.NODE_FAILED}
    return [job for job in idle if job.state not in forgiven and job.exit_code != GAVE_WAY]


def excluded_nodes(jobs: Iterable[Job], nodes: int, needed: int) -> tuple[str, ...]:
    """Return the nodes that failed in earlier jobs, as far as enough others are left.

    Parameters
    ----------
    nodes, needed : int
        Numbers of nodes of the site, and of the next job.
    """
    failed = sorted({node for job in jobs for node in job.failed_nodes})
    # Excluding too many nodes would keep the job waiting forever.
    return tuple(failed[: max(0, nodes - needed)])
