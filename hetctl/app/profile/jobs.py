"""Profiling jobs, submitted so that a crash at any instruction neither loses nor doubles them.

Before a submission, ``jobs.json`` records the names of the jobs. If a crash leaves them without ids, the
next command searches by these names and adopts the jobs that the batch system has. It removes
``measurements.json`` of the others, so that a late submission measures nothing.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hetctl.app.profile.folder import events_of, ingest, last_sign_of
from hetctl.app.project import Project
from hetctl.app.run.submission import find_settled, submit_measuring
from hetctl.catalog.catalog import Catalog
from hetctl.cluster.batch.base import START_PATIENCE_S, BatchSystem, SubmissionInDoubtError
from hetctl.cluster.render import JobScript
from hetctl.model.ensemble import COMMAND, Ensemble
from hetctl.model.errors import HetctlError
from hetctl.model.job import PROFILE, JobSize, JobState, JobStatus
from hetctl.model.profile import INTER_NODE, ProfilePoint
from hetctl.model.site import Site
from hetctl.model.values import dataclass
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.paths import RunFolder
from hetctl.storage.profile_request import (
    LAYERS,
    LINKS,
    RATE,
    USUAL_COMMAND_S,
    Measurements,
    ProfileJobs,
    ProfileTarget,
    ended_file,
    jobs_file,
    measurements_file,
    read_jobs,
    write_jobs,
    write_measurements,
)

POINT_S = {RATE: 60, LAYERS: 900, LINKS: 60}
"""Seconds allowed for each point, one after another, when the job's time limit is chosen."""
SHORTEST_JOB_S = 600
SUBMITIT = "submitit"
"""Subfolder of a job's folder for submitit's files."""


@dataclass(frozen=True)
class ProfileCommand:
    """Input of a profiling command.

    Parameters
    ----------
    jobs : int
        Largest number of jobs for the points.
    max_concurrent : int or None
        Largest number of jobs that run at the same time.
    force : bool
        True to measure known points again.
    command_s : float or None
        Seconds for which the command of a member runs at most, on each number of GPUs; None: the usual ones.
    wall_s : int or None
        Time limit of each job in seconds, as given by the user; None: what its points need.
    beyond : bool
        True to measure on more GPUs than FLEET's rules ask for.
    every : bool
        True to measure points that cannot change the plan, too, on every number of GPUs.
    detach : bool
        True to end when the job is submitted.
    sized : bool
        True if the user gave the number of GPUs: FLEET's rules may then ask for more than those of two nodes.
    """

    ensemble: Ensemble
    site: Site
    size: JobSize
    jobs: int = 1
    max_concurrent: int | None = None
    force: bool = False
    command_s: float | None = None
    wall_s: int | None = None
    beyond: bool = False
    every: bool = False
    detach: bool = False
    sized: bool = True

    @property
    def measures_all(self) -> bool:
        """True if no point is skipped."""
        return self.every or self.beyond


@dataclass(frozen=True)
class ProfileJob:
    """A profiling job that the batch system has, or had."""

    id: str
    folder: Path
    wall_s: int
    submitted_at: float

    @property
    def has_returned(self) -> bool:
        """True if it has said that it measures nothing more."""
        return ended_file(self.folder).exists()

    def is_over(self, status: JobStatus, now: float | None = None) -> bool:
        """Return true if it measures nothing more; files decide if the batch system forgot the job.

        Parameters
        ----------
        now : float or None
            Time since the epoch in seconds, by default the present.
        """
        if status.state is not JobState.UNKNOWN:
            return status.state.over
        last = last_sign_of(self.folder)
        # The batch system forgot the job: a job that has started may still measure until its limit.
        patience = START_PATIENCE_S if last is None else self.wall_s
        return (time.time() if now is None else now) > (last or self.submitted_at) + patience


@dataclass(frozen=True)
class JobGroup:
    """Profiling jobs that were submitted together; `profiles` is the parent of their folders."""

    profiles: Path
    record: ProfileJobs

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders of all jobs."""
        return tuple(self.profiles / name for name in self.record.folders)

    @property
    def jobs(self) -> list[ProfileJob]:
        """Jobs that the batch system has, or had."""
        record = self.record
        pairs = zip(record.ids, self.folders, strict=False)
        return [ProfileJob(job, path, record.wall_s, record.submitted_at) for job, path in pairs if job]

    @property
    def ids(self) -> list[str]:
        """Ids of these jobs."""
        return [job.id for job in self.jobs]

    @property
    def has_returned(self) -> bool:
        """True if all jobs have said that they measure nothing more."""
        return bool(self.record.ids) and all(job.has_returned for job in self.jobs)

    def ingest(self, catalog: Catalog) -> None:
        """Store what is measured so far."""
        for folder in self.folders:
            ingest(catalog, folder)

    def close(self, catalog: Catalog) -> None:
        """Store the measurements of jobs that are over, and close the group: it is not queried again."""
        # Stored before the group is closed: after a crash in between it is read again, and nothing is lost.
        self.ingest(catalog)
        self.noted(over=True)

    def withdraw(self) -> None:
        """Withdraw the measurements of jobs that the batch system does not have."""
        for folder in self.folders:
            _withdraw(folder)
        self.noted(over=True)

    def noted(self, *, ids: tuple[str, ...] | None = None, over: bool = False) -> JobGroup:
        """Write a changed record of the group, and return the group with it."""
        known = self.record.ids if ids is None else ids
        group = replace(self, record=replace(self.record, ids=known, over=over))
        write_jobs(group.folders[0], group.record)
        return group


def submit(
    project: Project,
    batch: BatchSystem,
    command: ProfileCommand,
    points: Sequence[ProfileTarget],
    preprocess_cores: tuple[int, ...] = (),
    known: tuple[ProfilePoint, ...] | None = None,
) -> JobGroup:
    """Submit jobs that measure points; the first also measures preprocessing on these numbers of cores.

    Parameters
    ----------
    known : tuple of ProfilePoint or None
        Rates by which a job chooses the points that can change the plan; None: it measures all points.

    Raises
    ------
    SubmissionInDoubtError
        If the batch system did not answer in time; the next command will find out the result.
    BatchSystemError
        If it refused.
    """
    ensemble, site, most = command.ensemble, command.site, command.max_concurrent
    queue = command.size.queue
    # More jobs than run at a time would only start more often.
    shares = split(points, min(command.jobs, queue.max_running or command.jobs))
    seconds = command.command_s or USUAL_COMMAND_S
    # Unique at the batch system: by these names the next command finds the jobs that a crash leaves.
    token = uuid.uuid4().hex[:12]
    record = ProfileJobs(
        name=f"hetctl-profile-{ensemble.name}-{token}",
        ensemble=ensemble.name,
        site=site.name,
        folders=tuple(f"{token}-{index}" for index in range(len(shares))),
        wall_s=command.wall_s or _wall_s(command, shares, seconds),
        submitted_at=time.time(),
    )
    # Each of several jobs would know the rates of its own points only.
    chooses = known is not None and not command.measures_all and len(shares) == 1
    group = JobGroup(project.home.profiles, record)
    make_private_folder(group.folders[0])
    # The ids are empty until the batch system has answered, which marks an interrupted submission.
    group.noted()
    ids: list[str] = []
    try:
        for name, folder, share in zip(record.names, group.folders, shares, strict=True):
            make_private_folder(folder)
            wanted = Measurements(ensemble, site, tuple(share), preprocess_cores, seconds)
            if chooses:
                wanted = replace(wanted, planned_gpus=command.size.gpus, known=known or ())
            write_measurements(folder, wanted)
            preprocess_cores = ()
            script = JobScript(
                mode=PROFILE,
                folder=RunFolder(folder),
                name=name,
                site=site,
                queue=queue,
                nodes=max(queue.min_nodes or 1, nodes_of(points, site.gpus_per_node)),
                wall_s=record.wall_s,
                home=project.home.path,
                after=ids[-most] if most and len(ids) >= most else None,
            )
            ids.append(submit_measuring(project, batch, script, folder / SUBMITIT))
    # The jobs may exist, so their files must stay; the next command searches for them.
    except SubmissionInDoubtError:
        raise
    except (HetctlError, OSError):
        group.withdraw()
        batch.cancel(ids)
        raise
    return group.noted(ids=tuple(ids))


def split(points: Sequence[ProfileTarget], jobs: int) -> list[list[ProfileTarget]]:
    """Split points into at most `jobs` shares with similar numbers of GPUs; the largest points come first."""
    shares: list[list[ProfileTarget]] = [[] for _ in range(min(jobs, len(points)))]
    for point in sorted(points, key=lambda point: -point.gpus):
        min(shares, key=lambda share: sum(other.gpus for other in share)).append(point)
    return shares


def nodes_of(points: Sequence[ProfileTarget], gpus_per_node: int) -> int:
    """Return the nodes that the largest point needs, at least one for each type of GPU."""
    links = any(point.member == INTER_NODE and point.what == LINKS for point in points)
    most = max(point.gpus for point in points)
    return max(-(-most // gpus_per_node), 1 + links, len({point.gpu_type for point in points}))


def _wall_s(command: ProfileCommand, shares: Sequence[Sequence[ProfileTarget]], command_s: float) -> int:
    """Return the limit of each job in seconds: what its points need, within that of the queue."""
    # A command is stopped and ended after its time.
    rate_s = POINT_S[RATE] + (math.ceil(command_s) if command.ensemble.framework == COMMAND else 0)
    point_s = {**POINT_S, RATE: rate_s}
    wanted_s = max(SHORTEST_JOB_S, *(sum(point_s[point.what] for point in share) for share in shares))
    return min(wanted_s, command.size.queue.max_wall_s or wanted_s)


def open_groups(profiles: Path) -> list[JobGroup]:
    """Return the groups that are not known to be over, the oldest first."""
    return [group for group in _groups(profiles) if not group.record.over]


def unread_folders(profiles: Path) -> list[Path]:
    """Return the folders with possibly unsaved measurements: all but those of groups that are over."""
    over = {name for group in _groups(profiles) if group.record.over for name in group.record.folders}
    found = sorted(profiles.glob(f"*/{measurements_file(Path()).name}"))
    return [path.parent for path in found if path.parent.name not in over]


def ingest_all(catalog: Catalog, profiles: Path) -> None:
    """Store measurements that are not in the catalog; close the groups that have returned."""
    # Determined before the folders are read: a group that returns meanwhile would be closed unread.
    returned = [group for group in open_groups(profiles) if group.has_returned]
    for folder in unread_folders(profiles):
        ingest(catalog, folder)
    for group in returned:
        group.noted(over=True)


def groups_under_way(
    batch: BatchSystem, catalog: Catalog, profiles: Path, ensemble: str, site: str, settle_s: float
) -> list[JobGroup]:
    """Return the groups of an ensemble at a site with unfinished jobs; close the others.

    Parameters
    ----------
    settle_s : float
        Time in seconds in which jobs of an interrupted submission may still appear.
    """
    groups = [g for g in open_groups(profiles) if (g.record.ensemble, g.record.site) == (ensemble, site)]
    groups = [found for found in (_with_ids(batch, group, settle_s) for group in groups) if found]
    # One query of the batch system for the jobs of all groups.
    alive = {job.folder for job in under_way(batch, [job for group in groups for job in group.jobs])}
    for group in groups:
        if alive.isdisjoint(group.folders):
            group.close(catalog)
    return [group for group in groups if not alive.isdisjoint(group.folders)]


def _with_ids(batch: BatchSystem, group: JobGroup, settle_s: float) -> JobGroup | None:
    """Return a group with the ids that an interrupted submission lacks; None if it has no job at all.

    The measurements file of a job that does not exist is removed.
    """
    if group.record.ids:
        return group
    names = group.record.names
    found = find_settled(batch, names, settle_s)
    if not found:
        group.withdraw()
        return None
    for name, folder in zip(names, group.folders, strict=True):
        if name not in found:
            _withdraw(folder)
    return group.noted(ids=tuple(found.get(name, "") for name in names))


def under_way(batch: BatchSystem, jobs: Iterable[ProfileJob]) -> list[ProfileJob]:
    """Return the jobs that are not over; the batch system is queried at most once."""
    waiting = [job for job in jobs if not job.has_returned]
    statuses = batch.statuses([job.id for job in waiting])
    return [job for job in waiting if not job.is_over(statuses[job.id])]


def _groups(profiles: Path) -> list[JobGroup]:
    found = profiles.glob(f"*/{jobs_file(Path()).name}")
    groups = [JobGroup(profiles, read_jobs(path.parent)) for path in found]
    return sorted(groups, key=lambda group: group.record.submitted_at)


def _withdraw(folder: Path) -> None:
    """Remove a job's measurements file, unless the job ran: its results are still to be read."""
    if not events_of(folder):
        measurements_file(folder).unlink(missing_ok=True)
