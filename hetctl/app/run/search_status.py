"""Trials of a run's search with their results; the run's files and the catalog are not changed."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace

from hetctl.app.project import Project
from hetctl.app.run.select_run import record_of
from hetctl.app.run.status import run_status
from hetctl.methods.automl.importance import importance_of
from hetctl.methods.automl.search_parts import space_of
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.events import Event
from hetctl.model.run_status import MemberStatus, RunStatus
from hetctl.model.searches import SEARCH_ENDED, TRIAL, SearchSpec, SearchStatus, TrialStatus
from hetctl.storage.progress_fold import events_in


def search_status(project: Project, run: str | None) -> SearchStatus:
    """Return the trials of a run, by default the newest, the best first.

    Raises
    ------
    BadInputError
        If the run has no search.
    """
    status = run_status(project, run)
    found = search_in(project, status)
    if found is None:
        raise BadInputError(
            f"run {status.run} has no search", "its members are those of the ensemble file: `hetctl status`"
        )
    return found


def search_in(project: Project, status: RunStatus) -> SearchStatus | None:
    """Return the trials of a run with this status, and what matters in them; None if it has no search."""
    with project.reading() as catalog:
        ensemble = record_of(catalog, status.run).spec.ensemble
    if ensemble.search is None:
        return None
    found = trials_of(status, ensemble, events_in(project.home.run(status.run)))
    sign = -1.0 if found.mode == "max" else 1.0
    losses = [(trial.config, sign * (trial.best or 0.0)) for trial in found.measured]
    varied = {key: of for key, of in space_of(ensemble.search).items() if key in found.varied_keys}
    return replace(found, importance=importance_of(losses, varied))


def trials_of(status: RunStatus, ensemble: Ensemble, events: Sequence[Event]) -> SearchStatus:
    """Return the trials of a run with a search, the best first, without their importance."""
    search = ensemble.search
    assert search is not None
    objective = ensemble.member(search.members[0]).objective
    asked = {str(event.data["member"]): event for event in events if event.kind == TRIAL}
    ends = [str(event.data["reason"]) for event in events if event.kind == SEARCH_ENDED]
    members = {member.member: member for member in status.members}
    trials = [
        _trial(search, event, members[name], status) for name, event in asked.items() if name in members
    ]
    best_first = tuple(sorted(trials, key=lambda trial: members[trial.member].rank))
    ended = ends[-1] if ends else None
    return SearchStatus(
        *(status.run, search.method, objective.metric, objective.mode),
        *(len(search.members), ended, best_first),
    )


def _trial(search: SearchSpec, event: Event, member: MemberStatus, status: RunStatus) -> TrialStatus:
    parent, history = event.data.get("parent"), status.history[member.member]
    return TrialStatus(
        number=int(event.data["number"]),
        member=member.member,
        state=member.state,
        config=event.data["config"],
        epochs=member.epochs,
        asked=int(event.data["epochs"]),
        best=member.best,
        last=history[-1].metrics.get(member.metric) if history else None,
        parent=search.members[parent["trial"]] if parent else None,
    )


def trials_as_csv(search: SearchStatus) -> str:
    """Return the trials as CSV, by number, with a column for each key of their configs."""
    keys = list(dict.fromkeys(key for trial in search.trials for key in trial.config))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    fixed = ["trial", "state", "epochs", "asked", f"best_{search.metric}", f"last_{search.metric}", "parent"]
    writer.writerow([*fixed, *keys])
    for trial in sorted(search.trials, key=lambda trial: trial.number):
        figures = [trial.member, trial.state, trial.epochs, trial.asked, trial.best, trial.last, trial.parent]
        writer.writerow([*figures, *(trial.config.get(key) for key in keys)])
    return text.getvalue()
