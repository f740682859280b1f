"""Selection of a run from the catalog."""

from __future__ import annotations

from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog, RunRecord
from hetctl.model.errors import BadInputError
from hetctl.model.run_states import ENDED


def record_of(catalog: Catalog, run: str | None) -> RunRecord:
    """Return a run's record, by default that of the newest.

    Raises
    ------
    BadInputError
        If there is no such run.
    """
    names = catalog.run_names()
    record = catalog.run(run or names[-1]) if names else None
    if record is None and names:
        raise BadInputError(
            f"no run {run!r} in the catalog, which has: {', '.join(names)}", "name one of these"
        )
    if record is None:
        raise BadInputError("there is no run in the catalog", "start one with `hetctl submit`")
    return record


def unfinished_run(project: Project, ensemble: str) -> str | None:
    """Return the name of the ensemble's newest run if that can continue."""
    if not project.home.catalog.exists():
        return None
    with project.reading() as catalog:
        record = unfinished(catalog, ensemble)
    return record.spec.run if record else None


def unfinished(catalog: Catalog, ensemble: str) -> RunRecord | None:
    """Return the record of the ensemble's newest run if that can continue."""
    records = catalog.runs(ensemble)
    return records[-1] if records and records[-1].state not in ENDED else None
