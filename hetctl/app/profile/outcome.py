"""Known rates of an ensemble at a site: in the catalog, and on the disk of profiling jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetctl.app.profile.folder import Failure, measured_in, measurements_in, points_in, preprocess_in
from hetctl.app.profile.jobs import ProfileJob, open_groups, unread_folders
from hetctl.app.project import Project
from hetctl.cluster.batch.base import BatchSystem
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BatchSystemError
from hetctl.model.job import JobState, JobStatus
from hetctl.model.profile import PreprocessPoint, ProfilePoint
from hetctl.model.rate_shapes import RateShape, shapes_of
from hetctl.model.site import Site


@dataclass(frozen=True)
class JobUnderWay:
    """A profiling job that may measure more.

    Parameters
    ----------
    job : str
        Id of the job; its name while it is unknown whether the batch system has it.
    state : str
        Name of a `JobState`.
    reason : str
        Reason why it waits, or why its state is not known.
    points, measured : int
        Numbers of its points, and of those that are measured on the disk.
    """

    job: str
    state: str
    reason: str
    points: int
    measured: int


@dataclass(frozen=True)
class ProfileOutcome:
    """Known rates, and the results of a profiling command.

    Parameters
    ----------
    measured, known : int
        Numbers of points measured now, and of points known before.
    shapes : tuple of RateShape
        Shapes of the ensemble, each with the member that is measured for it.
    """

    points: tuple[ProfilePoint, ...]
    preprocess: tuple[PreprocessPoint, ...]
    measured: int
    known: int
    failures: tuple[Failure, ...] = field(default=())
    under_way: tuple[JobUnderWay, ...] = field(default=())
    shapes: tuple[RateShape, ...] = field(default=())


def known_profile(project: Project, ensemble: Ensemble, site: Site) -> ProfileOutcome:
    """Return the rates of an ensemble at a site from the catalog, and from its jobs' folders."""
    with project.reading() as catalog:
        points = catalog.points(ensemble.name, site.name)
        preprocess = catalog.preprocess(ensemble.name, site.name)
    folders = folders_of(project.home.profiles, ensemble, site)
    points = _newest([*points, *(point for folder in folders for point in points_in(folder))])
    preprocess = [*preprocess, *(point for folder in folders for point in preprocess_in(folder))]
    by_cores = {point.cores: point for point in preprocess}
    return ProfileOutcome(
        points=tuple(points),
        preprocess=tuple(by_cores[cores] for cores in sorted(by_cores)),
        measured=0,
        known=len(points),
        under_way=jobs_under_way(project, ensemble, site),
        shapes=shapes_of(ensemble),
    )


def folders_of(profiles: Path, ensemble: Ensemble, site: Site) -> list[Path]:
    """Return the folders of profiling jobs whose measurements may not be in the catalog yet."""
    return [
        folder
        for folder, wanted in measurements_in(unread_folders(profiles))
        if (wanted.ensemble.name, wanted.site.name) == (ensemble.name, site.name)
    ]


def _newest(points: Iterable[ProfilePoint]) -> list[ProfilePoint]:
    """Return the newest point of each member, fingerprint, number and type of GPUs, as the catalog does."""
    newest: dict[tuple[str, int, str, str], ProfilePoint] = {}
    for point in sorted(points, key=lambda point: point.measured_at):
        newest[point.member, point.gpus, point.fingerprint, point.machine.gpu_type] = point
    return sorted(newest.values(), key=lambda point: (point.member, point.gpus, point.measured_at))


def jobs_under_way(project: Project, ensemble: Ensemble, site: Site) -> tuple[JobUnderWay, ...]:
    """Return the profiling jobs of an ensemble at a site that are not over."""
    groups = [
        group
        for group in open_groups(project.home.profiles)
        if (group.record.ensemble, group.record.site) == (ensemble.name, site.name)
    ]
    jobs = [job for group in groups for job in group.jobs if not job.has_returned]
    statuses = _statuses(project.batch_system(site), jobs)
    named = [
        _described(job.id, statuses[job.id], [job.folder])
        for job in jobs
        if not job.is_over(statuses[job.id])
    ]
    submitting = JobStatus(JobState.SUBMITTING)
    return (*named, *(_described(g.record.name, submitting, g.folders) for g in groups if not g.record.ids))


def _statuses(batch: BatchSystem, jobs: Sequence[ProfileJob]) -> Mapping[str, JobStatus]:
    """Return the jobs' states; if the batch system does not answer, they are unknown."""
    try:
        return batch.statuses([job.id for job in jobs])
    except BatchSystemError as error:
        return {job.id: JobStatus(JobState.UNKNOWN, reason=error.message) for job in jobs}


def _described(job: str, status: JobStatus, folders: Sequence[Path]) -> JobUnderWay:
    wanted = measurements_in(folders)
    return JobUnderWay(
        job=job,
        state=status.state.value,
        reason=status.reason,
        points=sum(len(measurements.points) for _, measurements in wanted),
        measured=sum(len(measured_in(folder)) for folder, _ in wanted),
    )
