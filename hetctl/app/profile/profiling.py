"""Profiling: selection of missing points, few jobs for many of them, and their results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetctl.app.interruptions import Interruption, Interruptions
from hetctl.app.profile.folder import Failure, failures_in, measured_in, measurements_in, wanted_of
from hetctl.app.profile.follow import Attending, ProfileMonitor, leave
from hetctl.app.profile.jobs import JobGroup, MeasureRequest, ingest_all
from hetctl.app.profile.known import current_points
from hetctl.app.profile.outcome import ProfileOutcome
from hetctl.app.project import Project
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.job import JobSize
from hetctl.model.profile import ProfilePoint
from hetctl.model.site import Site
from hetctl.perf.rate_extrapolation import largest_profile, profiled_gpus
from hetctl.storage.profile_request import ProfileTarget


@dataclass(frozen=True)
class ArraySpec:
    """Number of jobs for the points, and of jobs that may run at the same time."""

    jobs: int = 1
    max_concurrent: int | None = None


ONE_JOB = ArraySpec()


def profile(
    project: Project,
    ensemble: Ensemble,
    site: Site,
    size: JobSize,
    *,
    spread: ArraySpec = ONE_JOB,
    force: bool = False,
    observer: ProfileMonitor | None = None,
) -> ProfileOutcome:
    """Measure the missing points of FLEET's profile (appendix B.3) and store them in the catalog.

    First each member on 1 to M_b GPUs; then, if the rates on one GPU differ more than that, up to M_a.
    Points that a job of an earlier command is measuring are left to that job. All measurements are kept,
    also if this is interrupted.

    Raises
    ------
    BadInputError
        If the site lets nobody have so many jobs in its queues.
    InterruptedCommandError
        After SIGINT, SIGTERM or SIGHUP.
    """
    _refuse_too_many(spread, site)
    # Signals are kept from here on, so that none leaves a job without its record.
    with Interruptions() as interruptions, project.writing(create=True) as catalog:
        catalog.save_ensemble(ensemble)
        catalog.save_site(site)
        # A command that was killed has left measured points on the disk.
        ingest_all(catalog, project.home.profiles)
        attending = Attending(
            project.batch_system(site),
            catalog,
            interruptions,
            observer or ProfileMonitor(),
            project.home.profiles,
            project.waits,
        )
        session = _Session(attending, ensemble, site, size, spread, force)
        try:
            session.measure(session.missing(profiled_gpus(site.gpus_per_node)))
            session.measure(session.missing(session.most_gpus()))
        except Interruption as interruption:
            leave(interruption, "the command ended", "`hetctl profile` continues from here")
        return session.outcome()


def _refuse_too_many(spread: ArraySpec, site: Site) -> None:
    if site.max_queued_jobs is not None and spread.jobs > site.max_queued_jobs:
        raise BadInputError(
            f"--jobs {spread.jobs}: site {site.name} permits {site.max_queued_jobs} queued jobs per user",
            f"lower it to --jobs {site.max_queued_jobs}, or correct max_queued_jobs of the site file",
        )


class _Session:
    """State of one profiling command: the known points, and the jobs that measure the others."""

    def __init__(
        self,
        attending: Attending,
        ensemble: Ensemble,
        site: Site,
        size: JobSize,
        spread: ArraySpec,
        force: bool,
    ) -> None:
        self._attending = attending
        self._catalog = attending.catalog
        self._ensemble = ensemble
        self._site = site
        self._size = size
        self._spread = spread
        self._known = set() if force else {ProfileTarget(p.member, p.gpus) for p in self._current()}
        self._had = len(self._known)
        self._failures: list[Failure] = []
        self._earlier: list[JobGroup] | None = None

    def missing(self, most_gpus: int) -> list[ProfileTarget]:
        """Return the points up to a number of GPUs, of one type, that are neither known nor failed."""
        most_gpus = min(most_gpus, self._size.gpus, self._site.gpus_of_one_type)
        return self._untried(
            ProfileTarget(member.name, gpus)
            for member in self._ensemble.members
            for gpus in range(1, min(most_gpus, member.max_gpus or most_gpus) + 1)
        )

    def most_gpus(self) -> int:
        """Return M_t = max(M_a, M_b)."""
        single = [point.rate for point in self._current() if point.gpus == 1]
        return largest_profile(single, self._site.gpus_per_node)

    def measure(self, points: Sequence[ProfileTarget]) -> None:
        """Wait for earlier jobs that measure some of the points, then submit jobs for the others."""
        if not points:
            return
        self._adopt(points)
        if not (left := self._untried(points)):
            return
        group = self._attending.submit(self._request(left))
        self._attending.attend([group], left)
        self._take([group], left, lost=True)

    def outcome(self) -> ProfileOutcome:
        """Return the known points, and the results of this command."""
        ensemble, site = self._ensemble.name, self._site.name
        points = self._catalog.points(ensemble, site)
        return ProfileOutcome(
            points=tuple(points),
            preprocess=tuple(self._catalog.preprocess(ensemble, site)),
            measured=len(self._known) - self._had,
            known=self._had,
            failures=tuple(self._failures),
        )

    def _untried(self, points: Iterable[ProfileTarget]) -> list[ProfileTarget]:
        tried = self._known | {failure.point for failure in self._failures}
        return [point for point in points if point not in tried]

    def _current(self) -> list[ProfilePoint]:
        """Return the points in the catalog of the members as they are now."""
        points = self._catalog.points(self._ensemble.name, self._site.name)
        return [
            point
            for member in self._ensemble.members
            for point in current_points(points, self._ensemble, member.name)
        ]

    def _adopt(self, points: Sequence[ProfileTarget]) -> None:
        """Wait for the jobs of earlier commands that measure some of the points."""
        if self._earlier is None:
            self._earlier = self._attending.under_way(self._ensemble.name, self._site.name)
        shared = {group: self._wanted_of(group).intersection(points) for group in self._earlier}
        adopted = [group for group in self._earlier if shared[group]]
        if not adopted:
            return
        for group in adopted:
            self._attending.observer.adopted(group.ids, len(shared[group]))
        wanted = [point for point in points if any(point in shared[group] for group in adopted)]
        self._attending.attend(adopted, wanted)
        self._take(adopted, wanted, lost=False)
        self._earlier = [group for group in self._earlier if not shared[group]]

    def _wanted_of(self, group: JobGroup) -> set[ProfileTarget]:
        """Return the points of a group whose members are as they are now."""
        found = (wanted_of(wanted, self._ensemble) for _, wanted in measurements_in(group.folders))
        return set().union(*found)

    def _take(self, groups: Sequence[JobGroup], points: Sequence[ProfileTarget], *, lost: bool) -> None:
        """Add the measured points of jobs that have ended, and their failures."""
        for folder, measurements in measurements_in(path for group in groups for path in group.folders):
            share = wanted_of(measurements, self._ensemble).intersection(points)
            measured = measured_in(folder) & share
            self._known |= measured
            left = [point for point in points if point in share - measured]
            self._failures += failures_in(folder, left, lost=lost)

    def _request(self, points: Sequence[ProfileTarget]) -> MeasureRequest:
        return MeasureRequest(
            ensemble=self._ensemble,
            site=self._site,
            queue=self._size.queue,
            shares=tuple(tuple(share) for share in split(points, self._spread.jobs)),
            preprocess_cores=self._missing_cores(),
            max_concurrent=self._spread.max_concurrent,
        )

    def _missing_cores(self) -> tuple[int, ...]:
        """Return the numbers of cores without a measurement of the preprocessing, finished or in progress."""
        known = {p.cores for p in self._catalog.preprocess(self._ensemble.name, self._site.name)}
        folders = [folder for group in self._earlier or () for folder in group.folders]
        known.update(cores for _, wanted in measurements_in(folders) for cores in wanted.preprocess_cores)
        return tuple(n for n in _powers_of_two(self._site.cores_per_node) if n not in known)


def split(points: Sequence[ProfileTarget], jobs: int) -> list[list[ProfileTarget]]:
    """Split points into at most `jobs` shares with similar numbers of GPUs; the largest points come first."""
    shares: list[list[ProfileTarget]] = [[] for _ in range(min(jobs, len(points)))]
    for point in sorted(points, key=lambda point: -point.gpus):
        min(shares, key=lambda share: sum(other.gpus for other in share)).append(point)
    return shares


def _powers_of_two(limit: int) -> list[int]:
    return [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]
