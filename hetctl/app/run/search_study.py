"""Trials of a run's search as a database of Optuna."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Set
from contextlib import closing, suppress
from pathlib import Path

from hetctl.app.project import Project
from hetctl.app.run.search_status import trials_of
from hetctl.app.run.select_run import record_of
from hetctl.app.run.status import run_status
from hetctl.methods.automl.optuna_study import COMPLETE, FAIL, PRUNED, RUNNING, StudyTrial, update_study
from hetctl.methods.automl.search_parts import study_space_of
from hetctl.model.errors import BadInputError
from hetctl.model.events import Event
from hetctl.model.run_status import RunStatus
from hetctl.model.searches import REPORT, TRIAL, SearchStatus, TrialStatus
from hetctl.storage.progress_fold import events_in

STATES = {"converged": COMPLETE, "failed": FAIL}
"""States of trials in Optuna; a trial that is stopped may go on, and all others are running."""
DECIDES_AT_ONCE = "optuna"
"""Method that never goes on with a trial once it has asked for a new one."""


def export_study(project: Project, run: str | None, path: Path) -> RunStatus:
    """Write the trials of a run, by default the newest, into an SQLite database of Optuna; return its status.

    A new file appears whole or not at all. One that has the run's study already gets what is new.

    Raises
    ------
    BadInputError
        If the run has no search, the file is another one, or Optuna is missing.
    """
    status = run_status(project, run)
    if path.exists() and not _has_study(path, status.run):
        raise BadInputError(
            f"{path} exists already, and has no study of run {status.run}",
            "name a new file, or remove that one",
        )
    with project.reading() as catalog:
        ensemble = record_of(catalog, status.run).spec.ensemble
    if (search := ensemble.search) is None:
        raise BadInputError(f"run {status.run} has no search", "`hetctl search` needs a run with one")
    events = events_in(project.home.run(status.run))
    found = trials_of(status, ensemble, events)
    left = _left_behind(events) if search.method == DECIDES_AT_ONCE else ()
    trials = [
        _study_trial(status, trial, found, is_over=bool(found.ended) or trial.member in left)
        for trial in sorted(found.trials, key=lambda trial: trial.number)
    ]
    unfinished = path if path.exists() else path.with_name(f".{path.name}.{os.getpid()}")
    try:
        update_study(f"sqlite:///{unfinished}", status.run, found.mode, study_space_of(search), trials)
        unfinished.rename(path)
    finally:
        if unfinished != path:
            unfinished.unlink(missing_ok=True)
    return status


def _has_study(path: Path, name: str) -> bool:
    """Return true if a file is a database of Optuna with a study of this name."""
    place = f"{path.absolute().as_uri()}?mode=ro"
    with suppress(sqlite3.Error), closing(sqlite3.connect(place, uri=True)) as file:
        return bool(file.execute("SELECT 1 FROM studies WHERE study_name = ?", (name,)).fetchone())
    return False


def _left_behind(events: Iterable[Event]) -> Set[str]:
    """Return the members of trials that have reported, and after which a new trial was asked for."""
    begun, waiting, left = set[str](), set[str](), set[str]()
    for event in events:
        name = event.data.get("member", "")
        if event.kind == REPORT:
            waiting.add(name)
        elif event.kind == TRIAL and name in begun:
            waiting.discard(name)
        elif event.kind == TRIAL:
            begun.add(name)
            # Those that go on are asked for before any new one.
            left |= waiting
    return left


def _study_trial(status: RunStatus, trial: TrialStatus, search: SearchStatus, *, is_over: bool) -> StudyTrial:
    history = status.history[trial.member]
    values = {e.epoch: e.metrics[search.metric] for e in history if search.metric in e.metrics}
    state = PRUNED if trial.state == "stopped" and is_over else STATES.get(trial.state, RUNNING)
    if state == COMPLETE and not values:
        state = FAIL
    attributes = {"member": trial.member, **({"parent": trial.parent} if trial.parent else {})}
    return StudyTrial(trial.config, values, state, attributes)
