"""Tables of pipelines in training for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from hetctl.model.pipelines import PipelineLayout, PipelineStatus, PipelineUse, WaveCheck
from hetctl.reports.table_style import ruled_table
from hetctl.reports.units import NONE, format_bytes, format_percent, printable

NOTE = "waits: of first stages, for waves of others (D); idle: bubbles of all stages"

MOST_VIOLATIONS = 10
"""Violations of the bounds of staleness that are printed; JSON has all."""


def pipeline_tables(pipelines: Sequence[PipelineStatus]) -> list[RenderableType]:
    """Return tables with a line for each member that trains as a pipeline; empty if there are none."""
    if not pipelines:
        return []
    trained = [(one.member, one.last.use) for one in pipelines if one.last]
    sent = [Text(), _bytes(trained)] if trained else []
    return [Text(), _members(pipelines), Text(NOTE, "dim"), *sent]


def _members(pipelines: Sequence[PipelineStatus]) -> RenderableType:
    table = ruled_table(
        "members that\nare pipelines",
        "\nlayout",
        "slowest\nstage",
        ">\nbusy",
        ">\nwaits",
        ">\nidle",
        fold="members that\nare pipelines",
    )
    for one in pipelines:
        use = one.last.use if one.last else None
        table.add_row(
            Text(printable(one.member)),
            describe_layout(one.layout),
            Text(printable(use.slowest if use else NONE)),
            format_percent(use.busy if use else None),
            format_percent(use.wave_wait if use else None),
            format_percent(use.idle if use else None),
        )
    return table


def _bytes(trained: Iterable[tuple[str, PipelineUse]]) -> RenderableType:
    table = ruled_table(
        "bytes sent in\ntheir last epoch",
        ">within nodes:\npasses",
        ">\nparameters",
        ">between nodes:\npasses",
        ">\nparameters",
        gap=1,
        fold="bytes sent in\ntheir last epoch",
    )
    for name, use in trained:
        links = (use.within_node, use.between_nodes)
        sizes = [size for link in links for size in (link.passes, link.parameters)]
        table.add_row(Text(printable(name)), *map(format_bytes, sizes))
    return table


def wave_check_table(checks: Sequence[WaveCheck]) -> RenderableType:
    """Return a table with the staleness of pipelines beside its bounds, and a line for each violation."""
    table = ruled_table(
        "\nmember", ">in\nflight", ">\nD", ">mini-\nbatches", ">local\nlargest", ">\nbound",
        ">global\nlargest", ">\nbound", ">viola-\ntions", gap=1, fold="\nmember",
    )  # fmt: skip
    for one in checks:
        counts = (one.in_flight, one.distance, one.minibatches, one.local, one.local_bound)
        overall = (NONE, NONE) if one.overall is None else (f"{one.overall}", f"{one.overall_bound}")
        table.add_row(
            Text(printable(one.member)), *(f"{n:,}" for n in counts), *overall, f"{len(one.violations):,}"
        )
    found = [f"{one.member}: {line}" for one in checks for line in one.violations]
    more = [f"and {len(found) - MOST_VIOLATIONS:,} more"] if len(found) > MOST_VIOLATIONS else []
    lines = [Text(printable(line)) for line in [*found[:MOST_VIOLATIONS], *more]]
    return Group(table, *lines)


def describe_layout(layout: PipelineLayout) -> str:
    """Return ``2 x 3 stages, 4 in flight, D = 1``; unequal virtual workers have ``3 + 2 stages``."""
    counts = [len(stages) for stages in layout.workers]
    equal = len(set(counts)) == 1
    stages = f"{len(counts)} x {counts[0]}" if equal else " + ".join(map(str, counts))
    # A single virtual worker waits for no other one.
    distance = f", D = {layout.distance}" if len(counts) > 1 else ""
    return f"{stages} stages, {layout.in_flight} in flight{distance}"
