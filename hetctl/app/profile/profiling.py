"""Profiling: selection of missing points, few jobs for many of them, and their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetctl.app.plan.member_rules import refuse_wide_members
from hetctl.app.profile.folder import measurements_in
from hetctl.app.profile.follow import ProfileMonitor
from hetctl.app.profile.jobs import JobGroup
from hetctl.app.profile.known import RatePoints
from hetctl.app.profile.outcome import ProfileOutcome
from hetctl.app.profile.session import ProfileCommand, ProfileSession, profiling
from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.model.ensemble import COMMAND
from hetctl.model.profile import ProfilePoint
from hetctl.model.rate_shapes import RateShape, shapes_of
from hetctl.model.site import Cluster
from hetctl.perf.rate_extrapolation import largest_profile, profiled_gpus, rate_curve, usable_rates
from hetctl.storage.profile_request import ProfileTarget


def profile(
    project: Project, command: ProfileCommand, observer: ProfileMonitor | None = None
) -> ProfileOutcome:
    """Measure the missing points of FLEET's profile (appendix B.3) and store them in the catalog.

    One member of each shape is measured for all of them: first on 1 to M_b GPUs; then, if the rates on one
    GPU differ more than that, up to M_a; then, if asked, where plans would rely on predictions. Points that a
    job of an earlier command is measuring are left to that job. All measurements are kept, also if this is
    interrupted. Errors are those of `profiling`.

    Raises
    ------
    InfeasibleError
        If a member needs more GPUs than the job has.
    """
    cluster = Cluster.at(command.site, command.size.gpus)
    refuse_wide_members(command.ensemble.members, cluster, mix_types=True)
    with profiling(project, command, observer) as attending:
        rates = _Rates(command, attending.catalog)
        session = ProfileSession(attending, command, rates.known(), rates.missing_cores)
        session.measure(rates.targets(profiled_gpus(command.site.gpus_per_node)))
        session.measure(rates.targets(rates.most_gpus()))
        if command.beyond:
            session.measure(rates.beyond())
        ensemble, site = command.ensemble.name, command.site.name
        return ProfileOutcome(
            points=tuple(attending.catalog.points(ensemble, site)),
            preprocess=tuple(attending.catalog.preprocess(ensemble, site)),
            measured=session.measured,
            known=session.had,
            failures=tuple(session.failures),
            shapes=shapes_of(command.ensemble),
        )


class _Rates:
    """The rates of an ensemble at a site: the wanted ones, and those in the catalog."""

    def __init__(self, command: ProfileCommand, catalog: Catalog) -> None:
        self._ensemble, self._site, self._gpus = command.ensemble, command.site, command.size.gpus
        self._catalog = catalog
        self._shapes = shapes_of(command.ensemble)

    def known(self) -> Iterator[ProfileTarget]:
        """Yield the targets in the catalog."""
        return (
            ProfileTarget(name, point.gpus) for name, points in self._current().items() for point in points
        )

    def targets(self, most_gpus: int) -> Iterator[ProfileTarget]:
        """Yield the first member of each shape on all numbers of GPUs of one type up to `most_gpus`.

        A shape whose members need more than that, or than there are of one type, is measured on their least
        number or on as many as there are.
        """
        available = min(self._gpus, self._site.gpus_of_one_type)
        return (
            ProfileTarget(shape.member, gpus)
            for shape in self._shapes
            for gpus in measured_counts(shape, min(most_gpus, available), available)
        )

    def most_gpus(self) -> int:
        """Return M_t = max(M_a, M_b)."""
        fewest = [min(points, key=lambda point: point.gpus) for points in self._current().values() if points]
        single = [point.rate / point.gpus for point in fewest]
        return largest_profile(single, self._site.gpus_per_node)

    def beyond(self) -> Iterator[ProfileTarget]:
        """Yield the first member of each shape on more GPUs than were measured, where it may be faster."""
        most = min(self._gpus, self._site.gpus_of_one_type)
        return (
            ProfileTarget(shape.member, gpus)
            for shape in self._shapes
            for gpus in counts_beyond(shape, self._current()[shape.member], most)
        )

    def missing_cores(self, earlier: Sequence[JobGroup]) -> tuple[int, ...]:
        """Return the numbers of cores without a measurement of the preprocessing, finished or in progress."""
        if self._ensemble.framework == COMMAND:
            return ()
        known = {p.cores for p in self._catalog.preprocess(self._ensemble.name, self._site.name)}
        folders = [folder for group in earlier for folder in group.folders]
        known.update(cores for _, wanted in measurements_in(folders) for cores in wanted.preprocess_cores)
        return tuple(n for n in _powers_of_two(self._site.cores_per_node) if n not in known)

    def _current(self) -> dict[str, list[ProfilePoint]]:
        """Return the points in the catalog that hold for the shapes, by the first member of each."""
        points = RatePoints(self._catalog.points(self._ensemble.name, self._site.name), self._ensemble)
        return {shape.member: points.of(shape.member) for shape in self._shapes}


def measured_counts(shape: RateShape, most: int, available: int) -> range:
    """Return the numbers of GPUs on which the first member of a shape is measured.

    Parameters
    ----------
    most : int
        Largest number that is to be measured, out of those `available`.
    """
    least = min(shape.min_gpus, available)
    return range(least, max(min(most, shape.max_gpus or most), least) + 1)


def counts_beyond(shape: RateShape, points: Sequence[ProfilePoint], available: int) -> tuple[int, ...]:
    """Return the numbers of GPUs on which a shape is measured beyond those that were, to rely on no guess."""
    rates = usable_rates({point.gpus: point.rate for point in points})
    return rate_curve(rates, min(available, shape.max_gpus or available)).to_measure if rates else ()


def _powers_of_two(limit: int) -> list[int]:
    return [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]
