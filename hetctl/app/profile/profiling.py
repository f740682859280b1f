"""Profiling of rates, layers and links: few jobs measure the many points that are missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from hetctl.app.plan.job_request import refuse_wide_members
from hetctl.app.profile.catalog_profiles import RatePoints, current_layers, rows_of
from hetctl.app.profile.folder import Failure, measurements_in, records_in
from hetctl.app.profile.follow import ProfileMonitor
from hetctl.app.profile.jobs import JobGroup, ProfileCommand
from hetctl.app.profile.session import (
    JobUnderWay,
    ProfileOutcome,
    ProfileSession,
    folders_of,
    jobs_under_way,
    profiling,
)
from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.inputs.input_errors import suggestion
from hetctl.inputs.layer_profile import write_layers
from hetctl.model.combinations import features_of, refuse_conflicts
from hetctl.model.ensemble import COMMAND, Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.profile import (
    INTER_NODE,
    INTRA_NODE,
    LayerPoint,
    LinkPoint,
    ProfilePoint,
    RateShape,
    shapes_of,
)
from hetctl.model.site import Cluster, Site
from hetctl.perf.rate_extrapolation import largest_profile, profiled_gpus, rate_curve, usable_rates
from hetctl.storage.profile_request import LAYERS, LINKS, ProfileTarget


def profile(
    project: Project, command: ProfileCommand, observer: ProfileMonitor | None = None
) -> ProfileOutcome:
    """Measure the missing points of FLEET's profile (appendix B.3) and store them in the catalog.

    One member of each shape is measured for all of them: first on 1 to M_b GPUs; then up to M_a, if the rates
    on one GPU make that larger; then, if asked, where plans would rely on predictions. Points that an earlier
    command's job measures are left to it. An interruption keeps all measurements. Errors are those of
    `profiling`.

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
            known=session.known_before,
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
        return (
            ProfileTarget(name, point.gpus) for name, points in self._current().items() for point in points
        )

    def targets(self, most_gpus: int) -> Iterator[ProfileTarget]:
        """Yield the first member of each shape on all numbers of GPUs of one type up to `most_gpus`.

        A shape that needs more GPUs than that is measured on the least number that it needs, or on all of
        one type if those are fewer.
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
    """Return further numbers of GPUs on which to measure a shape, so that no plan relies on predictions."""
    rates = usable_rates({point.gpus: point.rate for point in points})
    return rate_curve(rates, min(available, shape.max_gpus or available)).to_measure if rates else ()


def _powers_of_two(limit: int) -> list[int]:
    return [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]


@dataclass(frozen=True)
class LayerOutcome:
    """Known layers and links, and the results of a profiling command.

    Parameters
    ----------
    layers : tuple of LayerPoint
        Layers of the requested members, as these are now.
    measured, known : int
        Numbers of targets measured now, and of targets known before.
    """

    layers: tuple[LayerPoint, ...]
    links: tuple[LinkPoint, ...]
    measured: int
    known: int
    failures: tuple[Failure, ...] = field(default=())
    under_way: tuple[JobUnderWay, ...] = field(default=())


def profile_layers(
    project: Project,
    command: ProfileCommand,
    members: Sequence[str],
    *,
    links: bool = False,
    observer: ProfileMonitor | None = None,
) -> LayerOutcome:
    """Measure the layers of members on each type of GPU, and the links where the site file has none.

    Parameters
    ----------
    members : sequence of str
        Names of the members.
    links : bool
        True to measure the links even if the site file has them.

    Raises
    ------
    BadInputError
        If the ensemble has no such member, or there are no two GPUs to measure links between; otherwise as
        in `profiling`.
    """
    refuse_strangers(command.ensemble, members)
    if members:
        refuse_conflicts(command.ensemble.name, "--layers", *features_of(command.ensemble))
    site, wanted = command.site, list(_layer_targets(command.site, members))
    if links or site.links is None:
        ends = list(_link_targets(site, command.size.gpus))
        if links and not ends:
            raise BadInputError(
                f"jobs of {command.size.gpus} GPUs at site {site.name} have no two GPUs with a link",
                "give --gpus a larger number, of two nodes if the site has several",
            )
        wanted += ends
    with profiling(project, command, observer) as attending:
        catalog = attending.catalog
        known = _known(catalog, command.ensemble, site)
        session = ProfileSession(attending, command, known.intersection(wanted))
        session.measure(wanted)
        stored = catalog.layers(command.ensemble.name, site.name)
        return LayerOutcome(
            layers=tuple(current_layers(stored, command.ensemble, members, site)),
            links=tuple(catalog.links(site.name)),
            measured=session.measured,
            known=session.known_before,
            failures=tuple(session.failures),
        )


def known_layers(project: Project, ensemble: Ensemble, site: Site, members: Sequence[str]) -> LayerOutcome:
    """Return the measured layers of members and the links, in the catalog and in the folders of jobs.

    Raises
    ------
    BadInputError
        If the ensemble has no such member.
    """
    refuse_strangers(ensemble, members)
    with project.reading() as catalog:
        layers, links = catalog.layers(ensemble.name, site.name), catalog.links(site.name)
    folders = folders_of(project.home.profiles, ensemble, site)
    layers += [point for folder in folders for point in records_in(folder, "layers")]
    links += [point for folder in folders for point in records_in(folder, "links")]
    newest_links = {point.link: point for point in sorted(links, key=lambda point: point.measured_at)}
    found = tuple(current_layers(layers, ensemble, members, site))
    return LayerOutcome(
        layers=found,
        links=tuple(newest_links.values()),
        measured=0,
        known=len(found) + len(newest_links),
        under_way=jobs_under_way(project, ensemble, site),
    )


def export_layers(project: Project, ensemble: Ensemble, site: Site, member: str, file: TextIO) -> None:
    """Write the measured layers of a member as a layer profile.

    Raises
    ------
    BadInputError
        If the ensemble has no such member, or its layers were not measured at this site.
    """
    found = known_layers(project, ensemble, site, [member]).layers
    if not found:
        raise BadInputError(
            f"the layers of {member} were not measured at site {site.name}, or {member} has changed since",
            f"run `hetctl profile --layers {member}` first",
        )
    write_layers(rows_of(found), file)


def refuse_strangers(ensemble: Ensemble, members: Iterable[str]) -> None:
    """Raise BadInputError if the ensemble does not have all these members."""
    known = [member.name for member in ensemble.members]
    for name in members:
        if name not in known:
            raise BadInputError(
                f"ensemble {ensemble.name} has no member {name!r}{suggestion(name, known)}",
                "name members of the ensemble file",
            )


def _layer_targets(site: Site, members: Iterable[str]) -> Iterator[ProfileTarget]:
    types = tuple(node_type.gpu_type for node_type in site.node_types) or (None,)
    for name in dict.fromkeys(members):
        yield from (ProfileTarget(name, 1, LAYERS, gpu_type) for gpu_type in types)


def _link_targets(site: Site, gpus: int) -> Iterator[ProfileTarget]:
    """Yield the kinds of links that a job of so many GPUs has."""
    if min(site.gpus_per_node, gpus) > 1:
        yield ProfileTarget(INTRA_NODE, 2, LINKS)
    if gpus > site.gpus_per_node:
        yield ProfileTarget(INTER_NODE, 2, LINKS)


def _known(catalog: Catalog, ensemble: Ensemble, site: Site) -> set[ProfileTarget]:
    names = [member.name for member in ensemble.members]
    layers = current_layers(catalog.layers(ensemble.name, site.name), ensemble, names, site)
    return {
        *(
            ProfileTarget(point.member, 1, LAYERS, point.machine.gpu_type if site.node_types else None)
            for point in layers
        ),
        *(ProfileTarget(point.link, 2, LINKS) for point in catalog.links(site.name)),
    }
