"""Profiling jobs: submitted so that a crash at any instruction neither loses nor doubles them.

Before anything is submitted, ``jobs.json`` says under which name it is going to be. What a crash leaves
without ids, the next command looks for by that name: jobs that the batch system has are adopted. Of
others ``measurements.json`` is removed, so that one that comes late after all measures nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hetctl.app.profile.folder import events_of, ingest, last_sign_of
from hetctl.catalog.catalog import Catalog
from hetctl.cluster.batch.base import BatchSystem, FunctionCall, SubmissionInDoubtError
from hetctl.cluster.batch.submitit_jobs import has_result, write_call
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import HetctlError
from hetctl.model.job import JobState, JobStatus
from hetctl.model.site import Queue, Site
from hetctl.runtime.driver.profile_job import run_profile_job
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.profile_request import (
    Measurements,
    ProfileJobs,
    ProfileTarget,
    jobs_file,
    measurements_file,
    read_jobs,
    write_jobs,
    write_measurements,
)

SETTLE_S = 3.0
"""The request of a command that was killed may still be on its way for so long."""
START_PATIENCE_S = 120
"""After this long, a job that nobody knows and that has not started is taken for gone."""
POINT_S = 60
"""Allowed for each point, in turn, when the job's time limit is chosen."""
SHORTEST_JOB_S = 600
CALLS = "submitit"
"""Folder of the calls, in that of the first job."""


@dataclass(frozen=True)
class MeasureRequest:
    """Points that profiling jobs are to measure, and the resources that they get.

    Parameters
    ----------
    shares : tuple of tuple of Point
        The points of each job.
    preprocess_cores : tuple of int
        As in `Measurements`, for the first job.
    at_once : int or None
        At most so many jobs run at the same time.
    """

    ensemble: Ensemble
    site: Site
    queue: Queue
    shares: tuple[tuple[ProfileTarget, ...], ...]
    preprocess_cores: tuple[int, ...]
    max_concurrent: int | None

    @property
    def nodes(self) -> int:
        """Nodes of each job: what its largest point needs."""
        most_gpus = max(point.gpus for share in self.shares for point in share)
        return -(-most_gpus // self.site.gpus_per_node)

    @property
    def wall_s(self) -> int:
        """Limit of each job."""
        wanted_s = max(SHORTEST_JOB_S, POINT_S * max(len(share) for share in self.shares))
        return min(wanted_s, self.queue.max_wall_s or wanted_s)


@dataclass(frozen=True)
class ProfileJob:
    """A profiling job that the batch system has, or had."""

    id: str
    folder: Path
    calls: Path
    wall_s: int
    submitted_at: float

    @property
    def has_returned(self) -> bool:
        """Return true if its function has returned or raised."""
        return has_result(self.calls, self.id)

    def is_over(self, status: JobStatus) -> bool:
        """Return true if it measures nothing more; of a forgotten job the files tell."""
        if status.state is not JobState.UNKNOWN:
            return status.state.over
        last = last_sign_of(self.folder)
        patience = START_PATIENCE_S if last is None else self.wall_s
        return time.time() > (last or self.submitted_at) + patience


@dataclass(frozen=True)
class JobGroup:
    """Profiling jobs that were submitted together; `profiles` is where their folders lie."""

    profiles: Path
    record: ProfileJobs

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders of all jobs."""
        return tuple(self.profiles / name for name in self.record.folders)

    @property
    def calls(self) -> Path:
        """Folder of submitit's calls."""
        return self.folders[0] / CALLS

    @property
    def jobs(self) -> list[ProfileJob]:
        """The jobs that the batch system has, or had."""
        record = self.record
        pairs = zip(record.ids, self.folders, strict=False)
        return [
            ProfileJob(job, path, self.calls, record.wall_s, record.submitted_at)
            for job, path in pairs
            if job
        ]

    @property
    def ids(self) -> list[str]:
        """Ids of these jobs."""
        return [job.id for job in self.jobs]

    @property
    def has_returned(self) -> bool:
        """Return true if the functions of all jobs have returned."""
        return bool(self.record.ids) and all(job.has_returned for job in self.jobs)

    def ingest(self, catalog: Catalog) -> None:
        """Keep what is measured so far."""
        for folder in self.folders:
            ingest(catalog, folder)

    def close(self, catalog: Catalog) -> None:
        """Keep what was measured by jobs that are over, which nobody needs to ask about any more."""
        self.ingest(catalog)
        self.noted(over=True)

    def withdraw(self) -> None:
        """Take back what jobs were to measure that the batch system does not have."""
        for folder in self.folders:
            _withdraw(folder)
        self.noted(over=True)

    def noted(self, *, ids: tuple[str, ...] | None = None, over: bool = False) -> JobGroup:
        """Write down what has become known."""
        known = self.record.ids if ids is None else ids
        group = replace(self, record=replace(self.record, ids=known, over=over))
        write_jobs(group.folders[0], group.record)
        return group


def submit(batch: BatchSystem, profiles: Path, request: MeasureRequest) -> JobGroup:
    """Submit profiling jobs, one for each share.

    Raises
    ------
    SubmissionInDoubtError
        If the batch system did not answer in time; the next command will find out.
    BatchSystemError
        If it refused.
    """
    group = _new_group(profiles, request)
    try:
        _write(group, request)
        ids = batch.call(_call(group, request))
    except SubmissionInDoubtError:
        raise
    except (HetctlError, OSError):
        group.withdraw()
        raise
    return group.noted(ids=ids)


def open_groups(profiles: Path) -> list[JobGroup]:
    """Return the groups, the oldest first, that are not known to be over."""
    return [group for group in _groups(profiles) if not group.record.over]


def unread_folders(profiles: Path) -> list[Path]:
    """Return the folders that may have what the catalog lacks: all but those of groups that are over."""
    over = {name for group in _groups(profiles) if group.record.over for name in group.record.folders}
    found = sorted(profiles.glob(f"*/{measurements_file(Path()).name}"))
    return [path.parent for path in found if path.parent.name not in over]


def ingest_all(catalog: Catalog, profiles: Path) -> None:
    """Keep what is measured and not yet in the catalog; close the groups that have returned."""
    returned = [group for group in open_groups(profiles) if group.has_returned]
    for folder in unread_folders(profiles):
        ingest(catalog, folder)
    for group in returned:
        group.noted(over=True)


def groups_under_way(
    batch: BatchSystem, catalog: Catalog, profiles: Path, ensemble: str, site: str
) -> list[JobGroup]:
    """Return the groups of an ensemble at a site that have a job under way; close the others."""
    groups = [g for g in open_groups(profiles) if (g.record.ensemble, g.record.site) == (ensemble, site)]
    groups = [found for found in (_with_ids(batch, group) for group in groups) if found]
    alive = {job.folder for job in under_way(batch, [job for group in groups for job in group.jobs])}
    for group in groups:
        if alive.isdisjoint(group.folders):
            group.close(catalog)
    return [group for group in groups if not alive.isdisjoint(group.folders)]


def _with_ids(batch: BatchSystem, group: JobGroup) -> JobGroup | None:
    """Find the jobs of a group whose submission was cut short; None if the batch system has none of them.

    What the crash left out is made good; of a job that is not there, what it was to measure is removed.
    """
    if group.record.ids:
        return group
    ids = batch.find_call(group.record.name, len(group.folders))
    if "" in ids:
        time.sleep(SETTLE_S)
        ids = batch.find_call(group.record.name, len(group.folders))
    if not any(ids):
        group.withdraw()
        return None
    for job, folder in zip(ids, group.folders, strict=True):
        if job:
            write_call(group.calls, run_profile_job, str(folder), job, group.record.wall_s)
        else:
            _withdraw(folder)
    return group.noted(ids=ids)


def under_way(batch: BatchSystem, jobs: Iterable[ProfileJob]) -> list[ProfileJob]:
    """Return the jobs that are not over; the batch system is asked once, if at all."""
    waiting = [job for job in jobs if not job.has_returned]
    statuses = batch.statuses([job.id for job in waiting])
    return [job for job in waiting if not job.is_over(statuses[job.id])]


def _groups(profiles: Path) -> list[JobGroup]:
    found = profiles.glob(f"*/{jobs_file(Path()).name}")
    groups = [JobGroup(profiles, read_jobs(path.parent)) for path in found]
    return sorted(groups, key=lambda group: group.record.submitted_at)


def _new_group(profiles: Path, request: MeasureRequest) -> JobGroup:
    """Write down under which name the jobs are about to be submitted."""
    token = uuid.uuid4().hex[:12]
    record = ProfileJobs(
        name=f"hetctl-profile-{request.ensemble.name}-{token}",
        ensemble=request.ensemble.name,
        site=request.site.name,
        folders=tuple(f"{token}-{index}" for index in range(len(request.shares))),
        wall_s=request.wall_s,
        submitted_at=time.time(),
    )
    group = JobGroup(profiles, record)
    make_private_folder(group.folders[0])
    return group.noted()


def _write(group: JobGroup, request: MeasureRequest) -> None:
    """Write what each job is to measure; the first takes the preprocessing."""
    cores = request.preprocess_cores
    for folder, share in zip(group.folders, request.shares, strict=True):
        make_private_folder(folder)
        write_measurements(folder, Measurements(request.ensemble, request.site, share, cores))
        cores = ()


def _call(group: JobGroup, request: MeasureRequest) -> FunctionCall:
    return FunctionCall(
        function=run_profile_job,
        arguments=tuple(str(folder) for folder in group.folders),
        folder=group.calls,
        name=group.record.name,
        site=request.site,
        queue=request.queue,
        nodes=request.nodes,
        wall_s=request.wall_s,
        max_concurrent=request.max_concurrent,
    )


def _withdraw(folder: Path) -> None:
    """Remove what a job was to measure, unless it ran: what it measured is still to be read."""
    if not events_of(folder):
        measurements_file(folder).unlink(missing_ok=True)
