"""Tables of runs: a list, logs, sizes, several beside each other, ensembles of members, an explanation."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from hetctl.model.exports import BEST_MEMBER, Combination, EnsembleResult
from hetctl.model.profile import some_of
from hetctl.model.run_results import (
    Explanation,
    LogFile,
    MemberResult,
    Removal,
    RunComparison,
    RunLine,
    RunLogs,
    RunSummary,
)
from hetctl.model.run_status import MOST_MEMBERS
from hetctl.model.seed_groups import PairedSeeds
from hetctl.reports.sections import Note, Section, more
from hetctl.reports.status_table import STYLES
from hetctl.reports.units import NONE, format_bytes, format_metric, format_seconds

MEMBERS = "more members, which `--json` has"
NAMED, WEIGHED, MOST_DIFFERENCES, MOST_COMPARED, LONGEST = 2, 4, 50, 50, 60
"""Limits: members of a difference, of an ensemble; differences; compared members; characters of a value."""


def runs_table(runs: Sequence[RunLine]) -> Section:
    """Return a table of runs."""
    rows = [
        (
            *(run.run, run.ensemble, run.site, Text(run.state, STYLES.get(run.state, "yellow"))),
            *(_members(run), _best(run), _time(run.results.began_at if run.results else None)),
            NONE if run.gpu_hours is None else f"{run.gpu_hours:,.2f}",
            *_node_hours(run.results),
            f"{run.results.cost.charged:,.2f}" if run.results else NONE,
        )
        for run in runs
    ]
    hours = (">GPU-\nhours", ">node-\nhours", ">\npredicted", ">\ncharged")
    headers = ("run", "ensemble", "site", "state", "members", "best", "started", *hours)
    gone = [run.run for run in runs if run.results is None]
    notes = [(f"the folder of {some_of(gone, NAMED)} is gone", "yellow")] if gone else []
    return Section(headers=headers, rows=rows, fold=("run", "best"), notes=notes, gap=0)


def _node_hours(results: RunSummary | None) -> tuple[str, str]:
    costs = (results.cost, results.predicted_cost) if results else (None, None)
    used, predicted = (NONE if cost is None else f"{cost.node_hours:,.2f}" for cost in costs)
    return used, predicted


def _members(run: RunLine) -> str:
    if run.results is None:
        return NONE
    failed = f", {run.results.failed} failed" if run.results.failed else ""
    return f"{run.results.converged}/{run.results.members}{failed}"


def _best(run: RunLine) -> str:
    if run.results is None or run.results.best is None:
        return NONE
    return f"{run.results.metric} {format_metric(run.results.best)} ({run.results.member})"


def _time(seconds: float | None) -> str:
    return NONE if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def logs_table(logs: RunLogs) -> list[Section]:
    """Return tables of the logs of jobs and members."""
    shown = logs.members[:MOST_MEMBERS]
    notes = more(len(logs.members) - MOST_MEMBERS, MEMBERS)
    notes += [(f"show one with: hetctl logs {logs.run} MEMBER, or --driver N", "")]
    return [
        Section(
            f"run {logs.run}", headers=("log", ">size", "written", "path"), rows=_rows(logs.jobs), fold="path"
        ),
        Section(headers=("member", ">size", "written", "path"), rows=_rows(shown), fold="path", notes=notes),
    ]


def _rows(logs: Sequence[LogFile]) -> list[tuple[str, str, str, str]]:
    return [(log.name, format_bytes(log.bytes), _time(log.written_at), log.path) for log in logs]


def removals_table(removals: Sequence[Removal]) -> Section:
    """Return a table of what is to be removed."""
    rows = [
        (
            *(one.run, one.state or NONE, format_bytes(one.folder_bytes), format_bytes(one.checkpoint_bytes)),
            format_bytes(one.folder_bytes + one.checkpoint_bytes),
        )
        for one in removals
    ]
    return Section(headers=("run", "state", ">events, logs", ">checkpoints", ">together"), rows=rows)


def comparison_tables(compared: RunComparison) -> list[Section]:
    """Return tables of what differs between runs, and of their results by member."""
    names = tuple(run.run for run in compared.runs)
    differences = [
        (
            one.key + (f" of {some_of(one.members, NAMED)}" if one.members else ""),
            *map(_value, one.values),
        )
        for one in compared.differences[:MOST_DIFFERENCES]
    ]
    members = list(compared.members.items())
    columns = (">best", ">at\nepoch", ">epochs", ">time", ">GPU-h")
    headers = ("member", "run", *columns)
    rows = [row for name, results in members[:MOST_COMPARED] for row in _results(name, names, results)]
    return [
        runs_table(compared.runs),
        Section(
            "\nWhat differs" if differences else "\nNo key differs",
            headers=("key", *names) if differences else (),
            rows=differences,
            fold=("key", *names),
            notes=more(len(compared.differences) - MOST_DIFFERENCES),
        ),
        *([_seeds(compared.seeds)] if compared.seeds else []),
        Section(
            "\nMembers",
            headers=headers,
            rows=rows,
            fold="member",
            notes=more(len(members) - MOST_COMPARED, MEMBERS),
        ),
    ]


def _seeds(pairs: Sequence[PairedSeeds]) -> Section:
    """Return a table of differences between runs, seed by seed."""
    rows = [
        (
            *(one.group, one.metric, f"{one.other} less {one.run}", str(one.difference.count)),
            f"{one.difference.mean:+.4g}",
            NONE if one.difference.half_width is None else f"± {format_metric(one.difference.half_width)}",
            "yes" if one.difference.excludes_zero else "not seen",
        )
        for one in pairs[:MOST_COMPARED]
    ]
    return Section(
        "\nSeeds, each with itself",
        headers=("member", "metric", "runs", ">seeds", ">difference", ">95 %", "differs"),
        rows=rows,
        fold=("member", "runs"),
    )


def _results(
    member: str, runs: Sequence[str], results: Sequence[MemberResult | None]
) -> Iterator[tuple[str, ...]]:
    for number, (run, result) in enumerate(zip(runs, results, strict=True)):
        name = "" if number else member
        if result is None:
            yield (name, run, *[NONE] * 5)
            continue
        epoch = NONE if result.epoch is None else str(result.epoch)
        best = NONE if result.best is None else f"{result.metric} {format_metric(result.best)}"
        times = (format_seconds(result.seconds), f"{result.gpu_seconds / 3600:,.3f}")
        yield (name, run, best, epoch, str(result.epochs), *times)


def _value(value: Any) -> str:
    if value is None:
        return NONE
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def explanation_section(one: Explanation) -> Section:
    """Return the explanation of a member's state."""
    notes: list[Note] = [(f"- {reason}", "") for reason in one.reasons]
    notes += [(f"next: {one.next_step}", "bold")] if one.next_step else []
    notes += [(f"log: {one.log}", "dim")] if one.log_tail else []
    return Section(f"{one.member} of run {one.run} is {one.state}", notes=notes, log=one.log_tail)


JUDGED = "judged by samples that had no part in the choice; 95 % by the paired bootstrap over them"


def ensemble_sections(found: EnsembleResult) -> list[Section]:
    """Return the table."""
    has_loss = any(one.loss is not None for one in found.combinations)
    headers = ("ensemble", f">{found.metric}", ">gain", ">95 %", "members")
    losses = (">log-loss", ">scaled\nlog-loss") if has_loss else ()
    rows = [(*_row(one)[:4], *(_losses(one) if has_loss else ()), _row(one)[4]) for one in found.combinations]
    notes: list[Note] = [(JUDGED, "dim")]
    if found.left_out:
        names = [f"{name} ({reason})" for name, reason in found.left_out.items()]
        notes += [(f"left out: {some_of(names, WEIGHED)}", "yellow")]
    if found.path is not None:
        notes += [(f"wrote {found.path}: from predict import predict_fn", "")]
    return [
        Section(
            f"run {found.run}: {len(found.candidates)} members, {found.samples:,} validation samples",
            headers=(*headers[:4], *losses, headers[4]),
            rows=rows,
            fold=("ensemble", "members"),
            notes=notes,
        )
    ]


def _row(one: Combination) -> tuple[str, ...]:
    gain, interval = NONE, NONE
    if one.gain is not None:
        gain = f"{one.gain.mean:+.4f}"
        interval = f"{one.gain.low:+.4f} .. {one.gain.high:+.4f}"
    return one.way, format_metric(one.value), gain, interval, _named(one.way, one.weights)


def _losses(one: Combination) -> tuple[str, ...]:
    return format_metric(one.loss), format_metric(one.scaled_loss)


def _named(way: str, weights: Mapping[str, float]) -> str:
    ordered = sorted(weights, key=lambda name: -weights[name])
    if way == BEST_MEMBER:
        return ordered[0]
    return some_of([f"{name} {weights[name]:.2g}" for name in ordered], WEIGHED)
