"""Import and export of rate tables, which are profiles in files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TextIO

from hetctl.app.profile.catalog_profiles import IMPORTED, RatePoints
from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.inputs.csv_table import RateRow, read_rates, write_rates
from hetctl.inputs.validation import NAME_RULE, SAFE_NAME
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.errors import BadInputError
from hetctl.model.profile import Hardware, ProfilePoint
from hetctl.model.site import Site


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
        _refuse_taken(catalog, name)
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


def _refuse_taken(catalog: Catalog, name: str) -> None:
    earlier = catalog.ensemble(name)
    if earlier is not None and earlier.framework != IMPORTED:
        raise BadInputError(
            f"ensemble {name} is in the catalog and has networks to train", "choose another --name"
        )
