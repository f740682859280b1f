"""Lists of runs, and runs beside each other: what differs in their input, and their results by member."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetctl.app.project import Project
from hetctl.app.run.select_run import named_run
from hetctl.catalog.stored_runs import ListedRun, listed_runs
from hetctl.model.interpreter import frozen_afterwards
from hetctl.model.job import UNDER_WAY
from hetctl.model.run_results import Difference, MemberResult, RunComparison, RunLine, RunSummary
from hetctl.model.seed_groups import PairedSeeds, groups_of, paired
from hetctl.model.serialization import rows_in_full
from hetctl.storage.paths import RunFolder
from hetctl.storage.patience import PATIENT
from hetctl.storage.run_files import read_spec
from hetctl.storage.run_results import known_summary, members_noted_with, results_of, summary_of
from hetctl.storage.run_state import state_in

OF_RUN = ("planner", "options", "sharing", "mode", "gpus", "queue", "wall_s", "retries", "modules")
"""Keys of a run that are compared."""
NOT_OF_ENSEMBLE = ("members", "name", "folder", "search")


def compare_runs(project: Project, names: Sequence[str]) -> RunComparison:
    """Compare runs.

    Raises
    ------
    BadInputError
        If there is no such run, or its folder is gone.
    """
    with frozen_afterwards():
        return _comparison(project, names)


def _comparison(project: Project, names: Sequence[str]) -> RunComparison:
    folders = [named_run(project, name) for name in dict.fromkeys(names)]
    lines = {line.run: line for line in runs_of(project, {folder.name for folder in folders})}
    # Decoding the specifications of large runs takes longer than all else.
    specs = [json.loads(folder.spec.read_bytes()) for folder in folders]
    for spec in specs:
        spec["ensemble"]["members"] = rows_in_full(spec["ensemble"]["members"])
    results = [_results(folder, lines[folder.name].results) for folder in folders]
    names = [folder.name for folder in folders]
    return RunComparison(
        runs=tuple(lines[folder.name] for folder in folders),
        differences=tuple(differences_of(specs)),
        members={
            name: tuple(of_run.get(name) for of_run in results)
            for name in dict.fromkeys(name for of_run in results for name in of_run)
        },
        seeds=tuple(_paired(specs[0], list(zip(names, results, strict=True)))),
    )


def _paired(
    spec: Mapping[str, Any], results: Sequence[tuple[str, Mapping[str, MemberResult]]]
) -> Iterator[PairedSeeds]:
    members = spec["ensemble"]["members"]
    (_, first), *_ = results
    for group, names in groups_of((member["name"], member.get("seeds_of", "")) for member in members).items():
        known = [name for name in names if name in first]
        if known:
            metric = first[known[0]].metric
            best = [(run, _bests(of_run, known, metric)) for run, of_run in results]
            yield from paired(group, known, metric, best)


def _bests(results: Mapping[str, MemberResult], names: Sequence[str], metric: str) -> dict[str, float]:
    found = {name: results[name] for name in names if name in results}
    return {name: one.best for name, one in found.items() if one.metric == metric and one.best is not None}


def _results(folder: RunFolder, summary: RunSummary | None) -> Mapping[str, MemberResult]:
    members = members_noted_with(folder, summary) if summary else None
    if members is None:
        spec = read_spec(folder)
        members = results_of(state_in(folder, spec), spec).members
    return {member.member: member for member in members}


def differences_of(specs: Sequence[Mapping[str, Any]]) -> Iterator[Difference]:
    """Yield the keys that differ between the specifications of runs, as in their files.

    Equal differences of several members are combined.
    """
    for key, values in _differing([dict(_of_run(spec)) for spec in specs]):
        yield Difference(key, (), values)
    first, *others = (spec["ensemble"]["members"] for spec in specs)
    if all(other == first for other in others):
        return
    members = [{member["name"]: member for member in spec["ensemble"]["members"]} for spec in specs]
    groups: dict[str, list[str]] = defaultdict(list)
    for name in members[0]:
        found = [of_run.get(name) for of_run in members]
        # Most members are equal.
        if None in found or all(one == found[0] for one in found):
            continue
        for key, values in _differing([dict(_flat(one or {})) for one in found]):
            groups[json.dumps([key, values])].append(name)
    for text, names in groups.items():
        key, values = json.loads(text)
        yield Difference(key, tuple(names), tuple(values))


def _of_run(spec: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "site", spec["site"]["name"]
    yield from _flat({key: spec.get(key) for key in OF_RUN})
    ensemble = spec["ensemble"]
    yield from _flat({key: value for key, value in ensemble.items() if key not in NOT_OF_ENSEMBLE})


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _differing(tables: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for key in dict.fromkeys(key for table in tables for key in table):
        values = tuple(table.get(key) for table in tables)
        if any(value != values[0] for value in values):
            yield key, values


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

        state, summary = PATIENT.call(state_and_summary, project, run)
        return replace(line, state=state, results=summary)
    if known := known_summary(folder):
        return replace(line, results=known)
    spec = read_spec(folder)
    return replace(line, results=summary_of(state_in(folder, spec), spec))
