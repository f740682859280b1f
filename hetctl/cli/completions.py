"""Completion of names in shells, from the names of files and the ensemble file.

It opens no catalog and reads no run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hetctl.model.errors import HetctlError

if TYPE_CHECKING:
    from hetctl.app.project import Project

NAMES = "names"
"""Parameter with a run and a member."""


def complete_runs(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the runs that begin so, the newest first."""
    return _beginning(runs_of(_project(context)), incomplete)


def complete_members(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the members that begin so of the run that is named before, or else of the newest, and runs."""
    project = _project(context)
    runs = runs_of(project)
    named = [name for name in context.params.get(NAMES) or () if name in runs]
    run = next(iter(named or runs), None)
    members = _members_of(project, run) if run else []
    return _beginning([*members, *([] if named else runs)], incomplete)


def complete_new_members(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the members of the ensemble file that begin so, and runs, unless one is named before."""
    from hetctl.app.project import ENSEMBLE_FILE

    project, named = _project(context), context.params.get(NAMES) or ()
    try:
        members = project.ensemble(context.params.get("ensemble") or ENSEMBLE_FILE).members
    except (HetctlError, OSError):
        members = ()
    runs = [] if named else runs_of(project)
    return _beginning([*(each.name for each in members if each.name not in named), *runs], incomplete)


def complete_trials(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the runs that begin so, or the trials of the run before the colon."""
    project = _project(context)
    run, colon, _ = incomplete.partition(":")
    if not colon:
        return _beginning([f"{name}:" for name in runs_of(project)], incomplete)
    return _beginning([f"{run}:{name}" for name in _members_of(project, run)], incomplete)


def complete_sites(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the sites that begin so."""
    return _beginning([name for name, _ in _project(context).sites()], incomplete)


def _members_of(project: Project, run: str) -> list[str]:
    from hetctl.model.events import DRIVER, REQUESTS

    files = project.home.run(run).events.glob("*.jsonl")
    return sorted(file.stem for file in files if file.stem not in (DRIVER, REQUESTS))


def runs_of(project: Project) -> list[str]:
    """Return the names of all runs, the last submitted first."""
    return [run.name for run in sorted(project.home.every_run(), key=lambda run: -run.spec.stat().st_mtime)]


def _project(context: click.Context) -> Project:
    from hetctl.app.project import Project

    return Project.here(context.find_root().obj)


def _beginning(names: list[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
