"""Trials of a run's search as a database of Optuna."""

from __future__ import annotations

import os
from pathlib import Path

from hetctl.app.project import Project
from hetctl.app.run.search_status import search_in
from hetctl.app.run.select_run import record_of
from hetctl.app.run.status import run_status
from hetctl.methods.automl.optuna_study import COMPLETE, FAIL, PRUNED, RUNNING, StudyTrial, write_study
from hetctl.methods.automl.search_parts import space_of
from hetctl.model.errors import BadInputError
from hetctl.model.run_status import RunStatus
from hetctl.model.trial_status import TrialStatus

STATES = {"converged": COMPLETE, "stopped": PRUNED, "failed": FAIL}
"""States of trials in Optuna; all others are running."""


def export_study(project: Project, run: str | None, path: Path) -> None:
    """Write the trials of a run, by default the newest, into a new SQLite database of Optuna.

    The file appears whole or not at all.

    Raises
    ------
    BadInputError
        If the run has no search, the file exists, or Optuna is missing.
    """
    if path.exists():
        raise BadInputError(f"{path} exists already", "name a new file, or remove that one")
    status = run_status(project, run)
    found = search_in(project, status)
    with project.reading() as catalog:
        search = record_of(catalog, status.run).spec.ensemble.search
    if found is None or search is None:
        raise BadInputError(f"run {status.run} has no search", "`hetctl search` needs a run with one")
    trials = [
        _study_trial(status, trial, found.metric)
        for trial in sorted(found.trials, key=lambda trial: trial.number)
    ]
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_study(f"sqlite:///{unfinished}", status.run, found.mode, space_of(search), trials)
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _study_trial(status: RunStatus, trial: TrialStatus, metric: str) -> StudyTrial:
    history = status.history[trial.member]
    values = {epoch.epoch: epoch.metrics[metric] for epoch in history if metric in epoch.metrics}
    state = STATES.get(trial.state, RUNNING)
    if state == COMPLETE and not values:
        state = FAIL
    attributes = {"member": trial.member, **({"parent": trial.parent} if trial.parent else {})}
    return StudyTrial(trial.config, values, state, attributes)
