"""Profiling for pipelines: the layers of members on each type of GPU, and the links between GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from hetctl.app.plan.member_rules import refuse_commands
from hetctl.app.profile.folder import Failure, layers_in, links_in
from hetctl.app.profile.follow import ProfileMonitor
from hetctl.app.profile.known import current_layers
from hetctl.app.profile.measured_layers import rows_of
from hetctl.app.profile.outcome import JobUnderWay, folders_of, jobs_under_way
from hetctl.app.profile.session import ProfileCommand, ProfileSession, profiling
from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.inputs.input_errors import suggestion
from hetctl.inputs.layer_profile import write_layers
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.profile import INTER_NODE, INTRA_NODE, LayerPoint, LinkPoint
from hetctl.model.site import Site
from hetctl.storage.profile_request import LAYERS, LINKS, ProfileTarget


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
        If the ensemble has no such member, or there are no two GPUs to measure links between; the others
        are those of `profiling`.
    """
    refuse_strangers(command.ensemble, members)
    if members:
        refuse_commands(command.ensemble, "hetctl does not see their layers", "leave out --layers")
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
            known=session.had,
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
    layers += [point for folder in folders for point in layers_in(folder)]
    links += [point for folder in folders for point in links_in(folder)]
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
    """Return the targets in the catalog, of the members as they are now."""
    names = [member.name for member in ensemble.members]
    layers = current_layers(catalog.layers(ensemble.name, site.name), ensemble, names, site)
    return {
        *(
            ProfileTarget(point.member, 1, LAYERS, point.machine.gpu_type if site.node_types else None)
            for point in layers
        ),
        *(ProfileTarget(point.link, 2, LINKS) for point in catalog.links(site.name)),
    }
