"""Selection of a run from the catalog."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog, RunRecord
from hetctl.model.errors import BadInputError
from hetctl.model.job import ENDED, UNDER_WAY, Job, JobState


def record_of(catalog: Catalog, run: str | None) -> RunRecord:
    """Return a run's record, by default of the newest.

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


def require_folder(project: Project, record: RunRecord, jobs: Sequence[Job]) -> None:
    """Raise BadInputError if the folder of a run was removed: nothing is known of its members without it."""
    spec, folder = record.spec, project.home.run(record.spec.run)
    # The folder is filled after the run is entered into the catalog, before its first job is submitted.
    if folder.spec.exists() or [job.state for job in jobs] == [JobState.SUBMITTING]:
        return
    new = "" if record.state in ENDED else " --new"
    steps = f"`hetctl submit{new}` starts another run"
    if record.state in UNDER_WAY:
        steps = f"`hetctl cancel {spec.run}` ends its jobs, {steps}"
    kept = project.home.checkpoints / spec.run
    raise BadInputError(
        f"the folder {folder.path} of run {spec.run} is gone, and with it what its members have done;"
        f" the run was {record.state}",
        f"{steps}; its checkpoints are still in {kept}" if kept.exists() else steps,
    )


def unfinished(catalog: Catalog, ensemble: str) -> RunRecord | None:
    """Return the record of the ensemble's newest run unless it has ended."""
    record = catalog.newest_run(ensemble)
    return record if record and record.state not in ENDED else None
