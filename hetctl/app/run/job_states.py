"""States of a run's jobs, by the batch system and by the files of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hetctl.catalog.catalog import Catalog
from hetctl.cluster.batch.base import START_PATIENCE_S, BatchSystem
from hetctl.model.events import DRIVER, Event, in_order
from hetctl.model.job import GAVE_WAY, Job, JobState, JobStatus
from hetctl.model.run_states import moved
from hetctl.storage.event_files import read_events
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_files import read_claim
from hetctl.storage.run_state import OF_JOBS


def refresh_jobs(
    catalog: Catalog, batch: BatchSystem, folder: RunFolder, ending: int | None = None
) -> tuple[Job, ...]:
    """Update the jobs of a run in the catalog, and return them; cancel those whose numbers others claimed.

    Parameters
    ----------
    ending : int or None
        Number of a job that is about to end, and counts as finished. It is not stored as finished: only
        the batch system will know why it ended.
    """
    known = catalog.jobs(folder.name)
    jobs = current_jobs(known, batch, job_events(folder), ending, claimant_in(folder))
    save_jobs(catalog, folder.name, jobs, ending)
    pairs = zip(known, jobs, strict=True)
    batch.cancel([old.batch_id for old, job in pairs if old.batch_id not in ("", job.batch_id)])
    return jobs


Claimant = Callable[[Job], str]
"""Function that returns the id of the batch job that has claimed a job's number; empty if none has yet."""


def claimant_in(folder: RunFolder) -> Claimant:
    """Return the claimants of a run's jobs, by their files."""
    return lambda job: read_claim(folder.job(job.number))


def save_jobs(catalog: Catalog, run: str, jobs: Sequence[Job], ending: int | None = None) -> None:
    """Store the jobs of a run, as returned by `current_jobs`."""
    for job in jobs:
        if job.number != ending:
            catalog.save_job(run, job)


def at_work(jobs: Sequence[Job], folder: RunFolder) -> list[Job]:
    """Return the jobs that may still train: neither over, nor reported as ended by their drivers."""
    ended = ended_by_files(jobs, job_events(folder), done=False, silent=True)
    return [job for job in ended if not job.state.over]


def job_events(folder: RunFolder) -> list[Event]:
    """Read the drivers' events about the jobs of a run, in order of time."""
    return in_order(read_events(folder.events_of(DRIVER), OF_JOBS))


def current_jobs(
    jobs: Sequence[Job],
    batch: BatchSystem,
    events: Sequence[Event],
    ending: int | None = None,
    claimant: Claimant = lambda job: job.batch_id,
) -> tuple[Job, ...]:
    """Return the jobs with states by one query of the batch system, or by files for those that it forgot.

    A job whose number another batch job has claimed is that one from now on.

    Parameters
    ----------
    events : sequence of Event
        Events as returned by `job_events`.
    """
    # One query for all jobs: batch systems limit or discourage frequent ones.
    alive = [job for job in jobs if job.batch_id and not job.state.over and job.number != ending]
    statuses = {**batch.statuses([job.batch_id for job in alive])}
    # Read after the query: a job that has left since another has its number is not asked about once more.
    claims = {job.number: claimant(job) for job in alive}
    others = [claims[job.number] for job in alive if claims[job.number] not in ("", job.batch_id)]
    statuses |= batch.statuses(others) if others else {}
    # A claim that this machine does not see yet is no end of the job.
    unseen = {job.batch_id for job in alive if not claims[job.number]}
    statuses |= {
        job: JobStatus(JobState.UNKNOWN, reason="another job has its number")
        for job in unseen
        if statuses[job].exit_code == GAVE_WAY
    }
    claimed = (replace(job, batch_id=claims.get(job.number) or job.batch_id) for job in jobs)
    return tuple(_updated(job, statuses, events, ending) for job in claimed)


def _updated(job: Job, statuses: Mapping[str, JobStatus], events: Sequence[Event], ending: int | None) -> Job:
    if job.state.over or not job.batch_id:
        return job
    own = [event for event in events if event.record.job == job.number]
    status = JobStatus(JobState.FINISHED) if job.number == ending else statuses[job.batch_id]
    if status.state is JobState.UNKNOWN:
        status = replace(status, state=_state_by_files(job, own))
    ended_at = max((event.time for event in own), default=time.time()) if status.state.over else None
    return moved(
        job,
        status.state,
        ended_at=ended_at,
        exit_code=status.exit_code,
        reason=status.reason,
        failed_nodes=_failed_nodes(status, own),
    )


def ended_by_files(
    jobs: Sequence[Job], events: Sequence[Event], *, done: bool, silent: bool
) -> tuple[Job, ...]:
    """Return the jobs, with FINISHED for those that have ended by the run's own files.

    Parameters
    ----------
    events : sequence of Event
        All events of the run, in order of time.
    done : bool
        True if no member needs any more training.
    silent : bool
        True if the batch system does not answer, so that the states are the last known ones. If it does
        answer, files decide only about the jobs that it has forgotten.
    """
    return tuple(
        _ended_by_files(job, events, done) if silent or job.state is JobState.UNKNOWN else job for job in jobs
    )


def _ended_by_files(job: Job, events: Sequence[Event], done: bool) -> Job:
    """Finish a job whose driver has reported its end, or that has started and has no work left."""
    own = [event for event in events if event.data.get("job") == job.number]
    has_started = any(event.kind == "job_started" for event in own)
    end = _reported_end(own) or (events[-1] if done and has_started else None)
    if job.state.over or end is None:
        return job
    return moved(job, JobState.FINISHED, ended_at=end.time)


def _failed_nodes(status: JobStatus, events: Sequence[Event]) -> tuple[str, ...]:
    """Return the nodes that ended the job or one of its steps, without those that were used after it."""
    seen: dict[str, None] = {}
    for event in events:
        if event.kind == "node_failed":
            seen |= dict.fromkeys(event.record.nodes)
        elif event.kind == "node_joined":
            seen.pop(event.record.node, None)
    return tuple(dict.fromkeys([*status.failed_nodes, *seen]))


def _state_by_files(job: Job, events: Sequence[Event]) -> JobState:
    """Return the state, by the run's own files, of a job that the batch system has forgotten."""
    if _reported_end(events):
        return JobState.FINISHED
    started = max((event.time for event in events), default=None)
    patience = job.wall_s if started is not None else START_PATIENCE_S
    # A started job ends within its limit; another one has only the time in which a submission appears.
    gone = time.time() > (started or job.submitted_at) + patience
    return JobState.VANISHED if gone else JobState.UNKNOWN


def _reported_end(events: Sequence[Event]) -> Event | None:
    """Return the report of a job's end; None if there is none, or the job was requeued and started since.

    Parameters
    ----------
    events : sequence of Event
        Events about the job, in order of time.
    """
    about_job = [event for event in events if event.kind in ("job_started", "job_ended")]
    return about_job[-1] if about_job and about_job[-1].kind == "job_ended" else None
