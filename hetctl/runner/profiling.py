"""Profiling: which points are missing, few jobs for many of them, what came of it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hetctl.batch.base import BatchSystem, FunctionCall
from hetctl.batch.functions import has_result
from hetctl.catalog.catalog import Catalog
from hetctl.core.codec import decode
from hetctl.core.ensemble import Ensemble
from hetctl.core.events import Event, read_folder
from hetctl.core.job import JobSize
from hetctl.core.layout import make_private_folder
from hetctl.core.measurement import Measurements, Point, read_measurements, write_measurements
from hetctl.core.profile import PreprocessPoint, ProfilePoint
from hetctl.core.site import Site
from hetctl.perf.scaling import largest_profile, profiled_gpus
from hetctl.runner.logs import tail_of
from hetctl.runner.profiles import current_points
from hetctl.runner.project import Project
from hetctl.runtime.measure_preprocessing import PREPROCESS
from hetctl.runtime.profile_job import run_profile_job

LOOK_S = 0.5
"""Between two looks at the files of a job."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Between two questions to the batch system; each pause is twice the one before it."""
POINT_S = 60
"""Allowed for each point, in turn, when the job's time limit is chosen."""
SHORTEST_JOB_S = 600
CALLS = "submitit"
"""Folder of the calls, in that of the first job."""

T = TypeVar("T")
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Failure:
    """A point that could not be measured, with the end of its log."""

    point: Point
    error: str
    log_tail: tuple[str, ...]


@dataclass(frozen=True)
class Spread:
    """Over how many jobs the points are spread, and how many of these may run at the same time."""

    jobs: int = 1
    at_once: int | None = None


@dataclass(frozen=True)
class ProfileOutcome:
    """What a profiling command did.

    Parameters
    ----------
    measured, known : int
        Points measured now, and points that were in the catalog already.
    """

    points: tuple[ProfilePoint, ...]
    preprocess: tuple[PreprocessPoint, ...]
    measured: int
    known: int
    failures: tuple[Failure, ...] = field(default=())


ONE_JOB = Spread()


def profile(
    project: Project,
    ensemble: Ensemble,
    site: Site,
    size: JobSize,
    *,
    spread: Spread = ONE_JOB,
    force: bool = False,
    on_progress: OnProgress = lambda _done, _total: None,
) -> ProfileOutcome:
    """Measure what is missing of FLEET's profile (appendix B.3) and keep it in the catalog.

    First each member on 1 to M_b GPUs; then, where the rates on one GPU differ more than that, up
    to M_a. Whatever was measured stays, also when this is interrupted.
    """
    with project.writing(create=True) as catalog:
        catalog.save_ensemble(ensemble)
        catalog.save_site(site)
        _ingest_leftovers(project, catalog)
        session = _Session(project, catalog, ensemble, site, size, spread, force, on_progress)
        session.measure(session.missing(profiled_gpus(site.gpus_per_node)))
        session.measure(session.missing(session.most_gpus()))
        return session.outcome()


def known_profile(project: Project, ensemble: Ensemble, site: Site) -> ProfileOutcome:
    """Return what the catalog has of an ensemble at a site."""
    with project.reading() as catalog:
        points = tuple(catalog.points(ensemble.name, site.name))
        preprocess = tuple(catalog.preprocess(ensemble.name, site.name))
    return ProfileOutcome(points, preprocess, 0, len(points))


class _Session:
    """One profiling command: knows what is measured, runs jobs for the rest."""

    def __init__(
        self,
        project: Project,
        catalog: Catalog,
        ensemble: Ensemble,
        site: Site,
        size: JobSize,
        spread: Spread,
        force: bool,
        on_progress: OnProgress,
    ) -> None:
        self._project = project
        self._catalog = catalog
        self._ensemble = ensemble
        self._site = site
        self._size = size
        self._spread = spread
        self._on_progress = on_progress
        self._known = set() if force else {Point(p.member, p.gpus) for p in self._current()}
        self._had = len(self._known)
        self._failures: list[Failure] = []

    def missing(self, most_gpus: int) -> list[Point]:
        """Return the points up to a number of GPUs that are neither known nor failed."""
        tried = self._known | {failure.point for failure in self._failures}
        wanted = (
            Point(member.name, gpus)
            for member in self._ensemble.members
            for gpus in range(1, min(most_gpus, self._size.gpus, member.max_gpus or most_gpus) + 1)
        )
        return [point for point in wanted if point not in tried]

    def most_gpus(self) -> int:
        """Return M_t = max(M_a, M_b)."""
        single = [point.rate for point in self._current() if point.gpus == 1]
        return largest_profile(single, self._site.gpus_per_node)

    def measure(self, points: list[Point]) -> None:
        """Run jobs for the points; report and keep each as soon as it is there."""
        if not points:
            return
        shares = split(points, self._spread.jobs)
        folders = self._write(shares)
        batch = self._project.batch_system(self._site)
        jobs = batch.call(self._call(folders, shares))
        try:
            self._follow(batch, dict(zip(jobs, folders, strict=True)), len(points))
        except BaseException:
            batch.cancel(jobs)
            raise
        finally:
            for folder in folders:
                _ingest(self._catalog, folder)
        for folder, share in zip(folders, shares, strict=True):
            measured = _measured_in(folder)
            self._known |= measured
            self._failures += _failures(folder, [point for point in share if point not in measured])

    def outcome(self) -> ProfileOutcome:
        """Return what is known now."""
        ensemble, site = self._ensemble.name, self._site.name
        points = self._catalog.points(ensemble, site)
        return ProfileOutcome(
            points=tuple(points),
            preprocess=tuple(self._catalog.preprocess(ensemble, site)),
            measured=len(self._known) - self._had,
            known=self._had,
            failures=tuple(self._failures),
        )

    def _current(self) -> list[ProfilePoint]:
        """Return what the catalog has of the members as they are now."""
        points = self._catalog.points(self._ensemble.name, self._site.name)
        return [
            point
            for member in self._ensemble.members
            for point in current_points(points, self._ensemble, member.name)
        ]

    def _write(self, shares: Sequence[Sequence[Point]]) -> list[Path]:
        """Write what each job is to measure, in a folder of its own; the first takes the preprocessing."""
        token = uuid.uuid4().hex[:12]
        folders = [self._project.home.profiles / f"{token}-{index}" for index in range(len(shares))]
        cores = self._missing_cores()
        for folder, share in zip(folders, shares, strict=True):
            make_private_folder(folder)
            write_measurements(folder, Measurements(self._ensemble, self._site, tuple(share), cores))
            cores = ()
        return folders

    def _missing_cores(self) -> tuple[int, ...]:
        known = {p.cores for p in self._catalog.preprocess(self._ensemble.name, self._site.name)}
        return tuple(n for n in _powers_of_two(self._site.cores_per_node) if n not in known)

    def _call(self, folders: Sequence[Path], shares: Sequence[Sequence[Point]]) -> FunctionCall:
        most_gpus = max(point.gpus for share in shares for point in share)
        wanted_s = max(SHORTEST_JOB_S, POINT_S * max(len(share) for share in shares))
        return FunctionCall(
            function=run_profile_job,
            arguments=tuple(str(folder) for folder in folders),
            folder=folders[0] / CALLS,
            name=f"hetctl-profile-{self._ensemble.name}",
            site=self._site,
            queue=self._size.queue,
            nodes=-(-most_gpus // self._site.gpus_per_node),
            wall_s=min(wanted_s, self._size.queue.max_wall_s or wanted_s),
            at_once=self._spread.at_once,
        )

    def _follow(self, batch: BatchSystem, jobs: Mapping[str, Path], total: int) -> None:
        """Look at the jobs' files until all are over; ask the batch system now and then."""
        waiting = set(jobs)
        calls = next(iter(jobs.values())) / CALLS
        for ask in _moments_to_ask():
            waiting = {job for job in waiting if not has_result(calls, job)}
            if ask and waiting:
                statuses = batch.statuses(sorted(waiting))
                waiting = {job for job in waiting if not statuses[job].state.over}
            self._on_progress(sum(_ended(folder) for folder in jobs.values()), total)
            if not waiting:
                return
            time.sleep(LOOK_S)


def split(points: Sequence[Point], jobs: int) -> list[list[Point]]:
    """Split points into at most so many shares of about as many GPUs; the points with most come first."""
    shares: list[list[Point]] = [[] for _ in range(min(jobs, len(points)))]
    for point in sorted(points, key=lambda point: -point.gpus):
        min(shares, key=lambda share: sum(other.gpus for other in share)).append(point)
    return shares


def _moments_to_ask() -> Iterator[bool]:
    """Say of each look at the files whether it is time to ask the batch system as well."""
    pause, asked_at = FIRST_PAUSE_S, time.monotonic()
    while True:
        due = time.monotonic() >= asked_at + pause
        if due:
            pause, asked_at = min(2 * pause, LONGEST_PAUSE_S), time.monotonic()
        yield due


def _ingest_leftovers(project: Project, catalog: Catalog) -> None:
    """Keep what jobs measured whose command did not live to see their end."""
    for path in sorted(project.home.profiles.glob("*/measurements.json")):
        _ingest(catalog, path.parent)


def _ingest(catalog: Catalog, folder: Path) -> None:
    measurements = read_measurements(folder)
    ensemble, site = measurements.ensemble.name, measurements.site.name
    events = read_folder(folder / "events")
    catalog.save_points(ensemble, site, _decoded(events, "point", ProfilePoint))
    catalog.save_preprocess(ensemble, site, _decoded(events, "preprocess", PreprocessPoint))


def _measured_in(folder: Path) -> set[Point]:
    points = _decoded(read_folder(folder / "events"), "point", ProfilePoint)
    return {Point(point.member, point.gpus) for point in points}


def _decoded(events: Iterable[Event], kind: str, of: type[T]) -> list[T]:
    return [decode(of, dict(event.data)) for event in events if event.kind == kind]


def _ended(folder: Path) -> int:
    """Count the points that are measured or have failed."""
    kinds = {"point", "failed"}
    ended = {e.source for e in read_folder(folder / "events") if e.kind in kinds}
    return len(ended - {PREPROCESS})


def _failures(folder: Path, points: list[Point]) -> list[Failure]:
    errors = {
        event.source: str(event.data["error"])
        for event in read_folder(folder / "events")
        if event.kind == "failed"
    }
    return [
        Failure(
            point,
            errors.get(point.source, "the job ended before it was measured"),
            tail_of(folder / "logs" / f"{point.source}.log"),
        )
        for point in points
    ]


def _powers_of_two(limit: int) -> list[int]:
    return [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]
