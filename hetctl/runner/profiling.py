"""Profiling: which points are missing, one job for many of them, what came of it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hetctl.batch.base import BatchSystem, FunctionCall
from hetctl.batch.functions import has_result
from hetctl.catalog.catalog import Catalog
from hetctl.core.codec import decode
from hetctl.core.ensemble import Ensemble
from hetctl.core.events import Event, read_folder
from hetctl.core.layout import make_private_folder
from hetctl.core.measurement import Measurements, Point, read_measurements, write_measurements
from hetctl.core.profile import PreprocessPoint, ProfilePoint
from hetctl.core.site import Site
from hetctl.perf.scaling import largest_profile, profiled_gpus
from hetctl.runner.jobs import JobSize
from hetctl.runner.logs import tail_of
from hetctl.runner.planning import current_points
from hetctl.runner.project import Project
from hetctl.runtime.measure import PREPROCESS
from hetctl.runtime.profile_job import run_profile_job

POLL_S = 0.5
POINT_S = 60
"""Allowed for each point, in turn, when the job's time limit is chosen."""
SHORTEST_JOB_S = 600

T = TypeVar("T")
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Failure:
    """A point that could not be measured, with the end of its log."""

    point: Point
    error: str
    log_tail: tuple[str, ...]


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


def profile(
    project: Project,
    ensemble: Ensemble,
    site: Site,
    size: JobSize,
    *,
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
        session = _Session(project, catalog, ensemble, site, size, force, on_progress)
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
        force: bool,
        on_progress: OnProgress,
    ) -> None:
        self._project = project
        self._catalog = catalog
        self._ensemble = ensemble
        self._site = site
        self._size = size
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
        """Run one job for the points; report and keep each as soon as it is there."""
        if not points:
            return
        folder = self._project.home.profiles / uuid.uuid4().hex[:12]
        make_private_folder(folder)
        write_measurements(folder, self._measurements(points))
        batch = self._project.batch_system(self._site)
        job = batch.call(self._call(folder, points))
        try:
            self._follow(folder, batch, job, points)
        except BaseException:
            batch.cancel([job])
            raise
        finally:
            _ingest(self._catalog, folder)
        measured = _measured_in(folder)
        self._known |= measured
        self._failures += _failures(folder, [point for point in points if point not in measured])

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

    def _measurements(self, points: list[Point]) -> Measurements:
        known = {p.cores for p in self._catalog.preprocess(self._ensemble.name, self._site.name)}
        cores = [n for n in _powers_of_two(self._site.cores_per_node) if n not in known]
        return Measurements(self._ensemble, self._site, tuple(points), tuple(cores))

    def _call(self, folder: Path, points: list[Point]) -> FunctionCall:
        nodes = -(-max(point.gpus for point in points) // self._site.gpus_per_node)
        wanted_s = max(SHORTEST_JOB_S, POINT_S * len(points))
        wall_s = min(wanted_s, self._size.queue.max_wall_s or wanted_s)
        return FunctionCall(
            function=run_profile_job,
            argument=str(folder),
            folder=folder / "submitit",
            name=f"hetctl-profile-{self._ensemble.name}",
            site=self._site,
            queue=self._size.queue,
            nodes=nodes,
            wall_s=wall_s,
        )

    def _follow(self, folder: Path, batch: BatchSystem, job: str, points: list[Point]) -> None:
        total = len(points)
        while not _is_over(folder, batch, job):
            self._on_progress(_ended(folder), total)
            time.sleep(POLL_S)
        self._on_progress(_ended(folder), total)


def _is_over(folder: Path, batch: BatchSystem, job: str) -> bool:
    return has_result(folder / "submitit", job) or batch.states([job])[job].over


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
