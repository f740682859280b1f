"""Profiling of rates, layers and links: few jobs measure the many points that are missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from typing import TextIO

from hetctl.app.plan.job_request import refuse_wide_members
from hetctl.app.profile.catalog_profiles import current_layers, rows_of
from hetctl.app.profile.folder import Failure, records_in
from hetctl.app.profile.follow import ProfileMonitor
from hetctl.app.profile.jobs import ProfileCommand
from hetctl.app.profile.rate_targets import ProfileCost, RateTargets
from hetctl.app.profile.session import (
    JobUnderWay,
    ProfileOutcome,
    ProfileSession,
    folders_of,
    jobs_under_way,
    known_profile,
    profiling,
)
from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.inputs.input_errors import suggestion
from hetctl.inputs.layer_profile import write_layers
from hetctl.model.combinations import features_of, refuse_conflicts
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.profile import (
    INTER_NODE,
    INTRA_NODE,
    LayerPoint,
    LinkPoint,
    shapes_of,
)
from hetctl.model.site import Cluster, Site
from hetctl.model.values import dataclass
from hetctl.storage.profile_request import LAYERS, LINKS, ProfileTarget


def profile(
    project: Project, command: ProfileCommand, observer: ProfileMonitor | None = None
) -> ProfileOutcome:
    """Measure the missing points of FLEET's profile (appendix B.3) and store them in the catalog.

    One member of each shape is measured for all of them: first on 1 to M_b GPUs; then up to M_a, if the rates
    on one GPU make that larger and the user gave a number of GPUs; then, if asked, where plans would rely on
    predictions. Unless all points are asked for, the job leaves out those that cannot change the plan. Points
    that an earlier command's job measures are left to it. An interruption keeps all measurements. Errors are
    those of `profiling`.

    Raises
    ------
    InfeasibleError
        If a member needs more GPUs than the job has.
    """
    cluster = Cluster.at(command.site, command.size.gpus)
    refuse_wide_members(command.ensemble.members, cluster, mix_types=True)
    with profiling(project, command, observer) as attending:
        ensemble, site = command.ensemble.name, command.site.name
        rates = RateTargets(command, lambda: attending.catalog.points(ensemble, site))
        session = ProfileSession(attending, command, rates.known(), rates)
        session.measure(rates.targets())
        if command.detach:
            return known_profile(project, command.ensemble, command.site)
        session.measure(rates.targets(rates.most_gpus()))
        if command.beyond:
            session.measure(rates.beyond())
        return ProfileOutcome(
            points=tuple(attending.catalog.points(ensemble, site)),
            preprocess=tuple(attending.catalog.preprocess(ensemble, site)),
            measured=session.measured,
            known=session.known_before,
            failures=tuple(session.failures),
            shapes=shapes_of(command.ensemble),
        )


def cost_of(project: Project, command: ProfileCommand) -> ProfileCost:
    """Return what it costs to measure the missing points; nothing is written."""
    if not project.home.catalog.exists():
        return RateTargets(command, tuple).cost()
    with project.reading() as catalog:
        stored = catalog.points(command.ensemble.name, command.site.name)
    return RateTargets(command, lambda: stored).cost()


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
        if command.detach:
            return known_layers(project, command.ensemble, site, members)
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
