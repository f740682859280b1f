"""Effect of a job's end on its run: continue, continue on other nodes, or stop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetctl.model.events import Event
from hetctl.model.job import Job, JobState

IDLE_JOBS = 2
"""Number of consecutive jobs without progress, although it was possible, after which a run stops."""
NODE_FAILURES = 3
"""Number of consecutive failures of nodes that do not count as jobs without progress."""

FREE = frozenset({JobState.PREEMPTED, JobState.CANCELLED})
"""Ends of jobs without a fault of the run; they predict nothing about the next job."""


def progressed_at(events: Iterable[Event]) -> list[float]:
    """Return the times of members' progress beyond all before, in seconds since the epoch."""
    furthest: dict[str, tuple[int, int]] = {}
    times = []
    for event in sorted(events, key=lambda event: event.time):
        if event.kind not in ("epoch", "checkpoint"):
            continue
        reached = int(event.data["epoch"]), int(event.data.get("part_samples", 0))
        if reached > furthest.get(event.source, (0, 0)):
            furthest[event.source] = reached
            times.append(event.time)
    return times


def reasons_of_jobs(events: Iterable[Event]) -> list[str]:
    """Return the reported reasons for the ends of the run's jobs, in order of time."""
    ended = [event for event in events if event.kind == "job_ended"]
    return [str(event.data["reason"]) for event in sorted(ended, key=lambda event: event.time)]


def idle_jobs(jobs: Sequence[Job], progress: Iterable[float]) -> list[Job]:
    """Return the jobs since the last progress that count as jobs without progress.

    Parameters
    ----------
    jobs : sequence of Job
        Jobs of one run, by number; all are over.
    progress : iterable of float
        Times as returned by `progressed_at`.
    """
    last = max(progress, default=0.0)
    idle = [job for job in jobs if job.submitted_at >= last]
    failed = [job for job in idle if job.state is JobState.NODE_FAILED]
    forgiven = FREE if len(failed) > NODE_FAILURES else FREE | {JobState.NODE_FAILED}
    return [job for job in idle if job.state not in forgiven]


def excluded_nodes(jobs: Iterable[Job], nodes: int, needed: int) -> tuple[str, ...]:
    """Return the nodes that failed in earlier jobs, as far as enough others are left.

    Parameters
    ----------
    nodes, needed : int
        Numbers of nodes of the site, and of the next job.
    """
    failed = sorted({node for job in jobs for node in job.failed_nodes})
    return tuple(failed[: max(0, nodes - needed)])
