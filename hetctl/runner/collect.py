"""Collecting: from the files of a run into the catalog, as often as one likes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetctl.batch.base import BatchSystem
from hetctl.catalog.catalog import Catalog
from hetctl.core.events import Event, read_folder
from hetctl.core.job import Job, JobState
from hetctl.core.layout import RunFolder
from hetctl.core.progress import events_in
from hetctl.core.run import read_round

START_PATIENCE_S = 120
"""After this long, a job that nobody knows and that has not started is taken for gone."""


def collect(catalog: Catalog, folder: RunFolder) -> None:
    """Ingest every event of a run that the catalog does not have yet."""
    for round_folder in folder.rounds():
        round_file = read_round(round_folder.file) if round_folder.file.exists() else None
        catalog.ingest(folder.name, round_folder.index, round_file, read_folder(round_folder.events))


def refresh_jobs(
    catalog: Catalog, batch: BatchSystem, folder: RunFolder, ending: int | None = None
) -> tuple[Job, ...]:
    """Bring the jobs of a run up to date; `ending` is the number of one that is about to end."""
    jobs = current_jobs(catalog.jobs(folder.name), batch, folder, ending)
    for job in jobs:
        catalog.save_job(folder.name, job)
    return jobs


def current_jobs(
    jobs: Sequence[Job], batch: BatchSystem, folder: RunFolder, ending: int | None = None
) -> tuple[Job, ...]:
    """Ask the batch system once for all jobs that were not over, and the run's files for the unknown."""
    alive = [job.batch_id for job in jobs if not job.state.over and job.number != ending]
    states = batch.states(alive)
    events = [event for event in events_in(folder) if event.kind.startswith("job_")]
    return tuple(_updated(job, states, events, ending) for job in jobs)


def _updated(job: Job, states: Mapping[str, JobState], events: Sequence[Event], ending: int | None) -> Job:
    if job.state.over:
        return job
    own = [event for event in events if event.data["job"] == job.number]
    state = JobState.FINISHED if job.number == ending else states[job.batch_id]
    if state is JobState.UNKNOWN:
        state = _state_by_files(job, own)
    ended_at = max((event.time for event in own), default=time.time()) if state.over else None
    return replace(job, state=state, ended_at=ended_at)


def _state_by_files(job: Job, events: Sequence[Event]) -> JobState:
    """Say what the run's own files tell of a job that the batch system has forgotten."""
    if any(event.kind == "job_ended" for event in events):
        return JobState.FINISHED
    started = max((event.time for event in events), default=None)
    patience = job.wall_s if started is not None else START_PATIENCE_S
    gone = time.time() > (started or job.submitted_at) + patience
    return JobState.FAILED if gone else JobState.UNKNOWN
