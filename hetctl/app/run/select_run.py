"""Selection of a run from the catalog."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from hetctl.app.project import Project
from hetctl.catalog.stored_runs import RunRecord, listed_runs, stored_run
from hetctl.model.errors import BadInputError
from hetctl.model.job import ENDED, UNDER_WAY, Job, JobState
from hetctl.model.profile import some_of
from hetctl.storage.paths import RunFolder

if TYPE_CHECKING:
    from hetctl.catalog.catalog import Catalog

MOST_NAMED = 20
"""Runs that a message names."""


def record_of(catalog: Catalog, run: str | None) -> RunRecord:
    """Return a run's record, by default of the newest.

    Raises
    ------
    BadInputError
        If there is no such run.
    """
    record = catalog.run(_name_among(catalog.run_names(), run))
    assert record is not None
    return record


def named_run(project: Project, run: str | None) -> RunFolder:
    """Return a run's folder, by default that of the newest; its specification is not read.

    Raises
    ------
    BadInputError
        If there is no such run, or its folder is gone.
    """
    folder = project.home.run(_name_among(_names(project), run))
    if not folder.spec.exists():
        raise BadInputError(f"the folder {folder.path} of run {folder.name} is gone", "name another run")
    return folder


def known_run(project: Project, run: str | None) -> tuple[RunRecord, list[Job]]:
    """Return a run's record, by default of the newest, and its jobs; errors as of `record_of`."""
    record, jobs = stored_run(project.home.catalog, _name_among(_names(project), run))
    # A run that was removed after its name was read is named no more.
    return (record, jobs) if record else known_run(project, run)


def _names(project: Project) -> list[str]:
    project.require_catalog()
    return [each.name for each in listed_runs(project.home.catalog)]


def split_names(
    runs: Collection[str], names: Sequence[str], most: float = math.inf
) -> tuple[str | None, tuple[str, ...]]:
    """Return the run that the first name is, None for the newest one, and the other names: its members.

    Parameters
    ----------
    runs : collection of str
        Names of all runs.
    most : int
        Largest number of members: with more names, the first one stands for a run.
    """
    is_run = bool(names) and (names[0] in runs or len(names) > most)
    return names[0] if is_run else None, tuple(dict.fromkeys(names[is_run:]))


def run_and_member(project: Project, names: Sequence[str]) -> tuple[str | None, str | None]:
    """Return a run, None for the newest one, and a member, None if none is named.

    Raises
    ------
    BadInputError
        If there are more names, or one is a path.
    """
    for name in names:
        if not is_name(name):
            raise BadInputError(f"{name!r} is the name of no run and of no member", "give names, not paths")
    if len(names) > 2:
        raise BadInputError(f"{len(names)} names are given", "name at most a run and a member")
    run, members = split_names(_names(project), names, most=1)
    return run, next(iter(members), None)


def is_name(run: str) -> bool:
    """Return true if a text may be the name of a run or member, and no path."""
    return "/" not in run and run not in ("", ".", "..")


def _name_among(names: Sequence[str], run: str | None) -> str:
    if not names:
        raise BadInputError("there is no run in the catalog", "start one with `hetctl submit`")
    if run is not None and run not in names:
        shown = some_of(names[::-1], MOST_NAMED)
        raise BadInputError(f"no run {run!r} in the catalog, which has: {shown}", "name one of these")
    return run or names[-1]


def require_folder(project: Project, record: RunRecord, jobs: Sequence[Job]) -> RunFolder:
    """Return a run's folder; BadInputError if it was removed: nothing else is known of its members."""
    spec, folder = record.spec, project.home.run(record.spec.run)
    # The folder is filled after the run is entered into the catalog, before its first job is submitted.
    if folder.spec.exists() or [job.state for job in jobs] == [JobState.SUBMITTING]:
        return folder
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
