"""State of one profiling command: the rates that are known, and the jobs that measure the others."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import NoReturn

from hetctl.app.profile.folder import (
    MEASURED,
    SKIPPED,
    Failure,
    failures_in,
    measurements_in,
    records_in,
    sources_in,
    wanted_of,
)
from hetctl.app.profile.follow import (
    Interruption,
    Interruptions,
    ProfileMonitor,
    follow,
    naming,
    raise_interrupted,
)
from hetctl.app.profile.jobs import (
    JobGroup,
    ProfileCommand,
    ProfileJob,
    groups_under_way,
    ingest_all,
    open_groups,
    submit,
    unread_folders,
)
from hetctl.app.profile.rate_targets import RateTargets
from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.catalog.lock import ProjectLock
from hetctl.cluster.batch.base import BatchSystem, SubmissionInDoubtError
from hetctl.model.combinations import features_of, refuse_conflicts
from hetctl.model.ensemble import COMMAND, Ensemble
from hetctl.model.errors import BadInputError, BatchSystemError, HetctlError
from hetctl.model.job import JobState, JobStatus
from hetctl.model.profile import PreprocessPoint, ProfilePoint, RateShape, shapes_of
from hetctl.model.site import Queue, Site
from hetctl.model.values import dataclass
from hetctl.storage.profile_request import ProfileTarget


@dataclass(frozen=True)
class JobUnderWay:
    """A profiling job that may measure more.

    Parameters
    ----------
    job : str
        Id of the job, or its name while its submission is in doubt.
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
    points = _newest([*points, *(point for folder in folders for point in records_in(folder, "point"))])
    preprocess += [point for folder in folders for point in records_in(folder, "preprocess")]
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
    """Return the newest point by member, fingerprint, number and type of GPUs, as the catalog does."""
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
        measured=sum(len(sources_in(folder, *MEASURED)) for folder, _ in wanted),
    )


@contextmanager
def profiling(
    project: Project, command: ProfileCommand, observer: ProfileMonitor | None
) -> Iterator[ProfileSession]:
    """Open the catalog for a profiling command; a signal within ends it, and measured points are kept.

    Raises
    ------
    BadInputError
        If the site's `max_queued_jobs` is smaller than the number of jobs.
    InterruptedCommandError
        After SIGINT, SIGTERM or SIGHUP.
    """
    _refuse_too_many(command.jobs, command.site, command.size.queue)
    if command.command_s is not None:
        refuse_conflicts(command.ensemble.name, "--for", *features_of(command.ensemble))
    # Signals are kept from here on, so that none leaves a job without its record.
    home = project.home
    project.require_catalog(create=True)
    with Interruptions() as interruptions, project.lock() as lock, Catalog.open(home.catalog) as catalog:
        catalog.save_ensemble(command.ensemble)
        catalog.save_site(command.site)
        # A killed command may have left measured points on the disk.
        ingest_all(catalog, home.profiles)
        try:
            yield ProfileSession(project, command, observer or ProfileMonitor(), catalog, lock, interruptions)
        except Interruption as interruption:
            raise_interrupted(interruption, "the command ended", "`hetctl profile` continues from here")


def _refuse_too_many(jobs: int, site: Site, queue: Queue) -> None:
    limits = {
        f"site {site.name}": (site.max_queued_jobs, "max_queued_jobs"),
        f"queue {queue.name}": (queue.max_jobs, "max_jobs"),
    }
    for where, (most, key) in limits.items():
        if most is not None and jobs > most:
            raise BadInputError(
                f"--jobs {jobs}: {where} permits {most} queued jobs per user",
                f"lower it to --jobs {most}, or correct {key} of the site file",
            )


class ProfileSession:
    """The targets of a command, measured by its own jobs or by those of earlier commands.

    A signal may interrupt the submission and monitoring of jobs at any time.

    Parameters
    ----------
    lock : ProjectLock
        Lock of the project, which this process has.

    Attributes
    ----------
    known_before : int
        Number of targets known before; 0 if they are measured again.
    failures : list of Failure
        Targets that could not be measured.
    """

    def __init__(
        self,
        project: Project,
        command: ProfileCommand,
        observer: ProfileMonitor,
        catalog: Catalog,
        lock: ProjectLock,
        interruptions: Interruptions,
    ) -> None:
        self._project, self._command, self._observer = project, command, observer
        self.catalog, self._lock, self._interruptions = catalog, lock, interruptions
        self._batch = project.batch_system(command.site)
        self._rates: RateTargets | None = None
        self._known: set[ProfileTarget] = set()
        self._skipped: set[ProfileTarget] = set()
        self._earlier: Sequence[JobGroup] = ()
        self.known_before = 0
        self.failures: list[Failure] = []

    def begin(self, known: Iterable[ProfileTarget], rates: RateTargets | None = None) -> None:
        """Note the targets in the catalog.

        Parameters
        ----------
        rates : RateTargets or None
            Choice of the rates that can change the plan; None: other targets, which are all measured.
        """
        self._known, self._rates = set() if self._command.force else set(known), rates
        self.known_before = len(self._known)

    @property
    def measured(self) -> int:
        """Number of targets measured by this command."""
        return len(self._known) - self.known_before

    def measure(self, points: Iterable[ProfileTarget]) -> None:
        """Measure the targets that are neither known nor failed.

        Wait for earlier jobs that measure some of them, then submit jobs for the others.
        """
        wanted = list(points)
        # Other commands may submit jobs while this one waits.
        while (left := self._untried(wanted)) and self._adopt(left):
            if self._command.detach:
                return
        rates = self._rates
        if not left or (rates and not rates.worth_measuring(left, self._known)):
            return
        cores, known = ((), None) if rates is None else (self._missing_cores(), rates.points(self._known))
        # A signal that arrives meanwhile is kept.
        self._interruptions.check()
        try:
            group = submit(self._project, self._batch, self._command, left, cores, known)
        except SubmissionInDoubtError:
            self._interruptions.check()  # Ctrl-C is also sent to sbatch and ends it
            raise
        if self._command.detach:
            return
        self._wait([group], left)
        self._take([group], left, lost=True)

    def _untried(self, points: Iterable[ProfileTarget]) -> list[ProfileTarget]:
        tried = self._known | self._skipped | {failure.point for failure in self.failures}
        return [point for point in points if point not in tried]

    def _missing_cores(self) -> tuple[int, ...]:
        """Return the numbers of cores without a measurement of the preprocessing, finished or in progress."""
        ensemble, site = self._command.ensemble, self._command.site
        if ensemble.framework == COMMAND:
            return ()
        known = {point.cores for point in self.catalog.preprocess(ensemble.name, site.name)}
        folders = [folder for group in self._earlier for folder in group.folders]
        known.update(cores for _, wanted in measurements_in(folders) for cores in wanted.preprocess_cores)
        doubled = (2**power for power in range(site.cores_per_node.bit_length()))
        return tuple(n for n in doubled if n <= site.cores_per_node and n not in known)

    def _adopt(self, points: Sequence[ProfileTarget]) -> bool:
        """Wait for other commands' jobs that measure some of the points; return false without any."""
        ensemble, site = self._command.ensemble, self._command.site
        with self._interruptions.heeded():
            self._earlier = groups_under_way(
                *(self._batch, self.catalog, self._project.home.profiles),
                *(ensemble.name, site.name, self._project.waits.settle_s),
            )
        shared = {group: self._wanted_of(group).intersection(points) for group in self._earlier}
        adopted = [group for group in self._earlier if shared[group]]
        if not adopted:
            return False
        for group in adopted:
            self._observer.adopted(group.ids, len(shared[group]))
        if self._command.detach:
            return True
        wanted = [point for point in points if any(point in shared[group] for group in adopted)]
        self._wait(adopted, wanted)
        self._take(adopted, wanted, lost=False)
        return True

    def _wanted_of(self, group: JobGroup) -> set[ProfileTarget]:
        """Return the points of a group whose members are as they are now."""
        found = (wanted_of(wanted, self._command.ensemble) for _, wanted in measurements_in(group.folders))
        return set().union(*found)

    def _take(self, groups: Sequence[JobGroup], points: Sequence[ProfileTarget], *, lost: bool) -> None:
        """Add the measured points of jobs that have ended, and their failures."""
        for folder, measurements in measurements_in(path for group in groups for path in group.folders):
            share = wanted_of(measurements, self._command.ensemble).intersection(points)
            ended = sources_in(folder, *MEASURED)
            measured = {point for point in share if point.source in ended}
            self._known |= measured
            skipped = sources_in(folder, SKIPPED)
            self._skipped |= {point for point in share if point.source in skipped}
            left = [point for point in points if point in share - measured - self._skipped]
            self.failures += failures_in(folder, left, lost=lost)

    def _wait(self, groups: Sequence[JobGroup], points: Sequence[ProfileTarget]) -> None:
        """Wait for jobs until they end or a signal arrives; store what is measured by then."""
        failure = None
        # This takes hours: runs would not go on meanwhile, nor could they be cancelled.
        with self._lock.released():
            try:
                self._follow([job for group in groups for job in group.jobs], points)
            except HetctlError as error:
                failure = error
        for group in groups:
            group.ingest(self.catalog)
        if failure:
            raise failure
        for group in groups:
            group.close(self.catalog)

    def _follow(self, jobs: Sequence[ProfileJob], points: Sequence[ProfileTarget]) -> None:
        try:
            with self._interruptions.heeded():
                follow(
                    *(self._batch, jobs, points, self._observer.progressed, self._interruptions.check),
                    *(self._project.waits.profile_poll_s, self._command.site.query_interval_s),
                )
        except Interruption as interruption:
            self._end(interruption, [job.id for job in jobs])

    def _end(self, interruption: Interruption, ids: Sequence[str]) -> NoReturn:
        # SIGTERM and SIGHUP come from a machine or a lost connection: the user has not decided to cancel.
        if interruption.number == signal.SIGINT and self._cancels(ids):
            self._batch.cancel(ids)
            raise_interrupted(
                interruption, naming(ids, "is cancelled", "are cancelled"), "measured points are kept"
            )
        raise_interrupted(
            interruption,
            naming(ids, "goes on measuring", "go on measuring"),
            "`hetctl profile` follows it to its end, `hetctl profile show` shows what is measured so far",
        )

    def _cancels(self, ids: Sequence[str]) -> bool:
        """Ask the user if possible; a second signal means that the jobs continue."""
        if not self._observer.can_ask:
            return True
        try:
            with self._interruptions.heeded():
                return self._observer.cancels(ids)
        except Interruption:
            return False
