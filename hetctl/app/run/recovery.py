"""What the end of a job means for its run: go on, go on elsewhere, or stop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetctl.model.events import Event
from hetctl.model.job import Job, JobState

IDLE_JOBS = 2
"""So many jobs in a row that got nothing done, and could have, stop a run."""
NODE_FAILURES = 3
"""So many failures of nodes in a row are forgiven."""

FREE = frozenset({JobState.PREEMPTED, JobState.CANCELLED})
"""Ends that are nobody's fault, and say nothing about the next job."""


def progressed_at(events: Iterable[Event]) -> list[float]:
    """Return when members got further than ever before, in seconds since the epoch."""
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
    """Return why the run's jobs ended, of those that ended in order, in order of time."""
    ended = [event for event in events if event.kind == "job_ended"]
    return [str(event.data["reason"]) for event in sorted(ended, key=lambda event: event.time)]


def idle_jobs(jobs: Sequence[Job], progress: Iterable[float]) -> list[Job]:
    """Return the jobs since the last progress that are held against the run.

    Parameters
    ----------
    jobs : sequence of Job
        Of one run, by number; all are over.
    progress : iterable of float
        As `progressed_at` returns them.
    """
    last = max(progress, default=0.0)
    idle = [job for job in jobs if job.submitted_at >= last]
    failed = [job for job in idle if job.state is JobState.NODE_FAILED]
    forgiven = FREE if len(failed) > NODE_FAILURES else FREE | {JobState.NODE_FAILED}
    return [job for job in idle if job.state not in forgiven]


def excluded_nodes(jobs: Iterable[Job], nodes: int, needed: int) -> tuple[str, ...]:
    """Return the nodes that failed under earlier jobs, as far as enough others are left.

    Parameters
    ----------
    nodes, needed : int
        Of the site, and of the next job.
    """
    failed = sorted({node for job in jobs for node in job.failed_nodes})
    return tuple(failed[: max(0, nodes - needed)])
