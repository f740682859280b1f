"""Profiling of rates, layers and links: few jobs measure the many points that are missing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from hashlib import sha256
from pathlib import Path
from typing import TextIO

from hetctl.app.plan.job_request import refuse_wide_members
from hetctl.app.profile.catalog_profiles import IMPORTED, RatePoints, current_layers, rows_of
from hetctl.app.profile.folder import Failure, records_in
from hetctl.app.profile.follow import ProfileMonitor
from hetctl.app.profile.jobs import ProfileCommand
from hetctl.app.profile.rate_targets import ProfileCost, RateTargets
from hetctl.app.profile.session import (
    JobUnderWay,
    ProfileOutcome,
    folders_of,
    jobs_under_way,
    known_profile,
    profiling,
)
from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.inputs.csv_table import RateRow, read_rates, write_rates
from hetctl.inputs.input_errors import suggestion
from hetctl.inputs.layer_profile import write_layers
from hetctl.inputs.validation import NAME_RULE, SAFE_NAME
from hetctl.model.combinations import features_of, refuse_conflicts
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.errors import BadInputError
from hetctl.model.profile import (
    INTER_NODE,
    INTRA_NODE,
    Hardware,
    LayerPoint,
    LinkPoint,
    ProfilePoint,
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
    refuse_wide_members(command.ensemble.members, Cluster.at(command.site, command.size.gpus), mix_types=True)
    with profiling(project, command, observer) as session:
        ensemble, site = command.ensemble.name, command.site.name
        rates = RateTargets(command, lambda: session.catalog.points(ensemble, site))
        session.begin(rates.known(), rates)
        session.measure(rates.targets())
        if command.detach:
            return known_profile(project, command.ensemble, command.site)
        session.measure(rates.targets(rates.most_gpus()))
        if command.beyond:
            session.measure(rates.beyond())
        return ProfileOutcome(
            points=tuple(session.catalog.points(ensemble, site)),
            preprocess=tuple(session.catalog.preprocess(ensemble, site)),
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
    with profiling(project, command, observer) as session:
        catalog = session.catalog
        session.begin(_known(catalog, command.ensemble, site).intersection(wanted))
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


def import_rates(project: Project, ensemble: Ensemble, site: Site, path: Path) -> int:
    """Store the rates of a table as an ensemble's profile; return their number.

    Raises
    ------
    BadInputError
        If anything in the table is wrong, or it names a member that the ensemble does not have.
    """
    rows = read_rates(path)
    members = {member.name: member for member in ensemble.members}
    strangers = sorted({row.member for row in rows} - members.keys())
    if strangers:
        raise BadInputError(
            f"{path}: ensemble {ensemble.name} has no member {', '.join(strangers)}",
            f"its members are: {', '.join(members)}",
        )
    points = _points(rows, members)
    with project.writing(create=True) as catalog:
        catalog.save_ensemble(ensemble)
        catalog.save_site(site)
        catalog.save_points(ensemble.name, site.name, points)
        # No other file of the project has these rates.
        catalog.back_up()
    return len(points)


def import_ensemble(project: Project, name: str, path: Path) -> tuple[Ensemble, int]:
    """Create an ensemble from the members of a rate table; return it, and the number of its rates.

    It can be simulated, but has no networks to train. It replaces an earlier import under this name. A
    member's configuration is a digest of its rates, so that rates of other tables do not apply to it. The
    ensemble is saved last; until then the earlier one is valid.

    Raises
    ------
    BadInputError
        If anything in the table is wrong or missing, or an ensemble with networks has the name.
    """
    if SAFE_NAME.fullmatch(name) is None:
        raise BadInputError(f"name: {NAME_RULE}, got {name!r}", "choose another --name")
    rows = read_rates(path, with_work=True)
    members = {member.name: member for member in _members(rows)}
    ensemble = Ensemble(name, IMPORTED, Functions("", ""), tuple(members.values()), folder="")
    with project.writing(create=True) as catalog:
        earlier = catalog.ensemble(name)
        if earlier is not None and earlier.framework != IMPORTED:
            raise BadInputError(
                f"ensemble {name} is in the catalog and has networks to train", "choose another --name"
            )
        catalog.save_points(name, IMPORTED, _points(rows, members))
        catalog.save_ensemble(ensemble)
        catalog.back_up()
    return ensemble, len(rows)


def export_rates(project: Project, ensemble: Ensemble, site: Site, file: TextIO) -> int:
    """Write an ensemble's profile as a rate table; return the number of rows.

    Raises
    ------
    BadInputError
        If the ensemble has no profile at this site.
    """
    with project.reading() as catalog:
        points = catalog.points(ensemble.name, site.name)
    of_members = RatePoints(points, ensemble)
    # A row for each member: a table is imported by the names of members, not by their shapes.
    known = [
        replace(p, member=member.name) for member in ensemble.members for p in of_members.of(member.name)
    ]
    if not known:
        raise BadInputError(
            f"there is no profile of {ensemble.name} at site {site.name}", "run `hetctl profile` first"
        )
    write_rates(
        (RateRow(p.member, p.gpus, p.rate, p.machine.gpu_type, p.samples, p.busy) for p in known), file
    )
    return len(known)


def _points(rows: Iterable[RateRow], members: Mapping[str, Member]) -> list[ProfilePoint]:
    now = time.time()
    return [
        ProfilePoint(
            member=row.member,
            gpus=row.gpus,
            rate=row.rate,
            fingerprint=members[row.member].fingerprint,
            batch_size=members[row.member].batch_size,
            measured_at=now,
            machine=Hardware(row.gpu_type or IMPORTED, IMPORTED, IMPORTED),
            samples=row.samples,
            busy=row.busy,
        )
        for row in rows
    ]


def _members(rows: Iterable[RateRow]) -> list[Member]:
    tables: dict[str, list[RateRow]] = {}
    for row in rows:
        tables.setdefault(row.member, []).append(row)
    # A digest in place of the table: configs are read, encoded and compared by every command.
    digests = {name: sha256(repr(table).encode()).hexdigest() for name, table in tables.items()}
    return [Member(name, {"rates": digest}) for name, digest in digests.items()]
