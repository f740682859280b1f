"""Trials of a run's search, with their results, and as a database of Optuna."""

from __future__ import annotations

import csv
import io
import math
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetctl.app.project import Project
from hetctl.app.run.select_run import known_run
from hetctl.app.run.status import run_status
from hetctl.methods.automl.optuna_study import (
    COMPLETE,
    FAIL,
    PRUNED,
    RUNNING,
    StudyTrial,
    key_importance,
    update_study,
)
from hetctl.methods.automl.search_run import search_space, study_space
from hetctl.methods.automl.trials import front_of
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.event_records import TrialRequested
from hetctl.model.events import Event
from hetctl.model.run_status import MemberStatus, RunStatus
from hetctl.model.searches import PART, REPORT, SEARCH_ENDED, TRIAL, SearchSpec, SearchStatus, TrialStatus
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import events_in


def search_status(project: Project, run: str | None) -> SearchStatus:
    """Return the trials of a run, by default the newest, the best first.

    Raises
    ------
    BadInputError
        If the run has no search.
    """
    status, ensemble, _ = _with_search(project, run)
    return explained(status, ensemble, project.home.run(status.run))


def _with_search(project: Project, run: str | None) -> tuple[RunStatus, Ensemble, SearchSpec]:
    status = run_status(project, run)
    ensemble = known_run(project, status.run)[0].spec.ensemble
    if ensemble.search is None:
        raise BadInputError(
            f"run {status.run} has no search", "its members are those of the ensemble file: `hetctl status`"
        )
    return status, ensemble, ensemble.search


def explained(status: RunStatus, ensemble: Ensemble, folder: RunFolder) -> SearchStatus:
    """Return the trials of a run with a search, the best first, and what matters in them."""
    assert ensemble.search is not None
    found = trials_of(status, ensemble, events_in(folder))
    sign = -1.0 if found.mode == "max" else 1.0
    losses = [(trial.config, sign * (trial.best or 0.0)) for trial in found.measured]
    varied = {key: of for key, of in search_space(ensemble.search).items() if key in found.varied_keys}
    return replace(found, importance=key_importance(losses, varied))


def trials_of(status: RunStatus, ensemble: Ensemble, events: Sequence[Event]) -> SearchStatus:
    """Return the trials of a run with a search, the best first, without their importance."""
    search = ensemble.search
    assert search is not None
    objective = ensemble.member(search.members[0]).objective
    asked = {event.record.member: event.record for event in events if event.kind == TRIAL}
    ends = [event.record.reason for event in events if event.kind == SEARCH_ENDED]
    parts = {event.source: event.record for event in events if event.kind == PART}
    members = {member.member: member for member in status.members}
    trials = [
        _trial(search, request, members[name], status, parts.get(name))
        for name, request in asked.items()
        if name in members
    ]
    trials = with_front(trials, {objective.metric: objective.mode, **search.also})
    best_first = tuple(sorted(trials, key=lambda trial: members[trial.member].rank))
    return SearchStatus(
        *(status.run, search.method, objective.metric, objective.mode),
        *(len(search.members), ends[-1] if ends else None, best_first),
        also=search.also,
    )


def with_front(trials: Sequence[TrialStatus], modes: Mapping[str, str]) -> list[TrialStatus]:
    """Mark the trials on the Pareto front of the newest values of several metrics.

    Parameters
    ----------
    modes : mapping of str to str
        Better direction by metric; the first is that of `TrialStatus.last`.
    """
    if len(modes) == 1:
        return list(trials)
    signs = [-1.0 if mode == "max" else 1.0 for mode in modes.values()]
    known = {
        trial.number: tuple(sign * value for sign, value in zip(signs, values, strict=True))
        for trial in trials
        if trial.last is not None and len(values := (trial.last, *trial.also.values())) == len(modes)
        if all(map(math.isfinite, values))
    }
    front = {*front_of(known)}
    return [replace(trial, on_front=trial.number in front) for trial in trials]


def _trial(
    search: SearchSpec, request: TrialRequested, member: MemberStatus, status: RunStatus, part: Any
) -> TrialStatus:
    history = status.history[member.member]
    newest = history[-1].metrics if history else {}
    if part and part.epoch > member.epochs:
        newest = {**newest, **part.metrics}
    return TrialStatus(
        number=request.number,
        member=member.member,
        state=member.state,
        config=request.config,
        epochs=member.epochs,
        asked=request.epochs,
        best=member.best,
        last=newest.get(member.metric),
        parent=search.members[request.parent.trial] if request.parent else None,
        also={metric: newest[metric] for metric in search.also if metric in newest},
    )


def trials_as_csv(search: SearchStatus) -> str:
    """Return the trials as CSV, by number, with a column for each key of their configs."""
    keys = list(dict.fromkeys(key for trial in search.trials for key in trial.config))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    fixed = ["trial", "state", "epochs", "asked", f"best_{search.metric}", f"last_{search.metric}", "parent"]
    also = [*(f"last_{metric}" for metric in search.also), "on_front"] if search.also else []
    writer.writerow([*fixed, *also, *keys])
    for trial in sorted(search.trials, key=lambda trial: trial.number):
        figures = [trial.member, trial.state, trial.epochs, trial.asked, trial.best, trial.last, trial.parent]
        more = [*map(trial.also.get, search.also), trial.on_front] if search.also else []
        writer.writerow([*figures, *more, *(trial.config.get(key) for key in keys)])
    return text.getvalue()


STATES = {"converged": COMPLETE, "failed": FAIL}
"""Optuna's states of trials; all others are running, as a stopped trial may go on."""
DECIDES_AT_ONCE = "optuna"
"""Method that never goes on with a trial once it has asked for a new one."""


def export_study(project: Project, run: str | None, path: Path) -> RunStatus:
    """Write the trials of a run, by default the newest, into an SQLite database of Optuna; return its status.

    A new file appears whole or not at all. A file that has the run's study gets the new trials.

    Raises
    ------
    BadInputError
        If the run has no search, the file is another one, or Optuna is missing.
    """
    status, ensemble, search = _with_search(project, run)
    if path.exists() and not _has_study(path, status.run):
        raise BadInputError(
            f"{path} exists already, and has no study of run {status.run}",
            "name a new file, or remove that one",
        )
    events = events_in(project.home.run(status.run))
    found = trials_of(status, ensemble, events)
    left = _passed_over(events) if search.method == DECIDES_AT_ONCE else ()
    trials = [
        _study_trial(status, trial, found, is_over=bool(found.ended) or trial.member in left)
        for trial in sorted(found.trials, key=lambda trial: trial.number)
    ]
    unfinished = path if path.exists() else path.with_name(f".{path.name}.{os.getpid()}")
    try:
        modes = [found.mode, *found.also.values()]
        update_study(f"sqlite:///{unfinished}", status.run, modes, study_space(search), trials)
        unfinished.rename(path)
    finally:
        if unfinished != path:
            unfinished.unlink(missing_ok=True)
    return status


def _has_study(path: Path, name: str) -> bool:
    place = f"{path.absolute().as_uri()}?mode=ro"
    with suppress(sqlite3.Error), closing(sqlite3.connect(place, uri=True)) as file:
        return bool(file.execute("SELECT 1 FROM studies WHERE study_name = ?", (name,)).fetchone())
    return False


def _passed_over(events: Iterable[Event]) -> Set[str]:
    """Return the members whose trials reported before the search asked for a new one."""
    begun, waiting, left = set[str](), set[str](), set[str]()
    for event in (event for event in events if event.kind in (TRIAL, REPORT)):
        name = event.record.member
        if event.kind == REPORT:
            waiting.add(name)
        elif name in begun:
            waiting.discard(name)
        else:
            begun.add(name)
            # A search asks for the trials that go on before any new one.
            left |= waiting
    return left


def _study_trial(status: RunStatus, trial: TrialStatus, search: SearchStatus, *, is_over: bool) -> StudyTrial:
    history = status.history[trial.member]
    metrics = (search.metric, *search.also)
    values = {
        e.epoch: [e.metrics[each] for each in metrics] for e in history if {*metrics} <= e.metrics.keys()
    }
    state = PRUNED if trial.state == "stopped" and is_over else STATES.get(trial.state, RUNNING)
    if state == COMPLETE and not values:
        state = FAIL
    attributes = {"member": trial.member, **({"parent": trial.parent} if trial.parent else {})}
    return StudyTrial(trial.config, values, state, attributes)
