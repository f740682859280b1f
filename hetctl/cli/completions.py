"""Completion of names in shells, from the names of files: it opens no catalog and reads no run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hetctl.app.project import Project

NAMES = "names"
"""Parameter with a run and a member."""


def complete_runs(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the runs that begin so, the newest first."""
    return _beginning(runs_of(_project(context)), incomplete)


def complete_members(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the members that begin so of the run that is named before, or else of the newest, and runs."""
    from hetctl.model.events import DRIVER, REQUESTS

    project = _project(context)
    runs = runs_of(project)
    named = [name for name in context.params.get(NAMES) or () if name in runs]
    run = next(iter(named or runs), None)
    files = project.home.run(run).events.glob("*.jsonl") if run else ()
    members = sorted(file.stem for file in files if file.stem not in (DRIVER, REQUESTS))
    return _beginning([*members, *([] if named else runs)], incomplete)


def complete_sites(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the sites that begin so."""
    return _beginning([name for name, _ in _project(context).sites()], incomplete)


def runs_of(project: Project) -> list[str]:
    """Return the names of all runs, the last submitted first."""
    return [run.name for run in sorted(project.home.every_run(), key=lambda run: -run.spec.stat().st_mtime)]


def _project(context: click.Context) -> Project:
    from hetctl.app.project import Project

    return Project.here(context.find_root().obj)


def _beginning(names: list[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
