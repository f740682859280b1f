"""List of all runs of a project, from the catalog and the results that their jobs have left."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from hetctl.app.project import Project
from hetctl.catalog.stored_runs import ListedRun, listed_runs
from hetctl.model.interpreter import frozen_afterwards
from hetctl.model.job import UNDER_WAY
from hetctl.model.run_results import RunLine
from hetctl.storage.run_files import read_spec
from hetctl.storage.run_results import known_summary, summary_of
from hetctl.storage.run_state import state_in


def runs_of(project: Project, names: Container[str] | None = None) -> list[RunLine]:
    """Return all runs, or the named ones, the newest first; only those under way are asked about."""
    project.require_catalog()
    listed = listed_runs(project.home.catalog)
    with frozen_afterwards():
        return [_line(project, run) for run in reversed(listed) if names is None or run.name in names]


def _line(project: Project, run: ListedRun) -> RunLine:
    folder = project.home.run(run.name)
    line = RunLine(run.name, run.ensemble, run.site, run.state, run.created_at, None)
    if not folder.spec.exists():
        return line
    if run.state in UNDER_WAY:
        # Imported here: most runs have ended.
        from hetctl.app.run.status import state_and_summary

        state, summary = state_and_summary(project, run)
        return replace(line, state=state, results=summary)
    if known := known_summary(folder):
        return replace(line, results=known)
    spec = read_spec(folder)
    return replace(line, results=summary_of(state_in(folder, spec), spec))
