"""Rate tables: profiles that come from a file, or go into one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TextIO

from hetctl.core.ensemble import Ensemble
from hetctl.core.errors import BadInputError
from hetctl.core.profile import Machine, ProfilePoint
from hetctl.core.site import Site
from hetctl.files.rate_table import RateRow, read_rates, write_rates
from hetctl.runner.planning import current_points
from hetctl.runner.project import Project


def import_rates(project: Project, ensemble: Ensemble, site: Site, path: Path) -> int:
    """Keep the rates of a table as an ensemble's profile; return how many.

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
    now = time.time()
    points = [
        ProfilePoint(
            member=row.member,
            gpus=row.gpus,
            rate=row.rate,
            fingerprint=members[row.member].fingerprint,
            batch_size=members[row.member].batch_size,
            measured_at=now,
            machine=Machine(row.gpu_type or "imported", "imported", "imported"),
            samples=row.samples,
        )
        for row in rows
    ]
    with project.writing(create=True) as catalog:
        catalog.save_ensemble(ensemble)
        catalog.save_site(site)
        catalog.save_points(ensemble.name, site.name, points)
    return len(points)


def export_rates(project: Project, ensemble: Ensemble, site: Site, file: TextIO) -> int:
    """Write an ensemble's profile as a rate table; return how many rows.

    Raises
    ------
    BadInputError
        If nothing is known of the ensemble at this site.
    """
    with project.reading() as catalog:
        points = catalog.points(ensemble.name, site.name)
    known = [point for member in ensemble.members for point in current_points(points, ensemble, member.name)]
    if not known:
        raise BadInputError(
            f"there is no profile of {ensemble.name} at site {site.name}", "run `hetctl profile` first"
        )
    write_rates((RateRow(p.member, p.gpus, p.rate, p.machine.gpu_type, p.samples) for p in known), file)
    return len(known)
