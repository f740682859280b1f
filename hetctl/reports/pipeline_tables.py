"""Tables of pipelines for the terminal: those in training, and the stages in a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetctl.model.pipelines import PipelineLayout, PipelineStatus, PipelineUse, StagePlan, WaveCheck
from hetctl.model.plan import Allocation, Plan
from hetctl.reports.style import ruled_table
from hetctl.reports.units import NONE, device_word, format_bytes, format_percent, printable

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
    first = "members that\nare pipelines"
    headers = (first, "\nlayout", "slowest\nstage", ">\nbusy", ">\nwaits", ">\nidle")
    rows = []
    for one in pipelines:
        use = one.last.use if one.last else None
        shares = (use.gpu_busy_fraction, use.wave_wait_fraction, use.idle_fraction) if use else (None,) * 3
        stage = use.slowest if use else NONE
        rows.append((one.member, describe_layout(one.layout), stage, *map(format_percent, shares)))
    return ruled_table(headers, rows, fold=first)


def _bytes(trained: Iterable[tuple[str, PipelineUse]]) -> RenderableType:
    first, parameters = "bytes sent in\ntheir last epoch", ">\nparameters"
    headers = (first, ">within nodes:\npasses", parameters, ">between nodes:\npasses", parameters)
    links = ((name, (use.within_node, use.between_nodes)) for name, use in trained)
    rows = (
        (name, *(format_bytes(size) for link in both for size in (link.passes, link.parameters)))
        for name, both in links
    )
    return ruled_table(headers, rows, gap=1, fold=first)


def wave_check_table(checks: Sequence[WaveCheck]) -> RenderableType:
    """Return a table with the staleness of pipelines beside its bounds, and a line for each violation."""
    headers = (
        "\nmember", ">in\nflight", ">\nD", ">mini-\nbatches", ">local\nlargest", ">\nbound",
        ">global\nlargest", ">\nbound", ">viola-\ntions",
    )  # fmt: skip
    rows = []
    for one in checks:
        counts = (one.in_flight, one.distance, one.minibatches, one.local, one.local_bound)
        overall = (NONE, NONE) if one.overall is None else (f"{one.overall}", f"{one.overall_bound}")
        rows.append((one.member, *(f"{n:,}" for n in counts), *overall, f"{len(one.violations):,}"))
    found = [f"{one.member}: {line}" for one in checks for line in one.violations]
    more = [f"and {len(found) - MOST_VIOLATIONS:,} more"] if len(found) > MOST_VIOLATIONS else []
    lines = [Text(printable(line)) for line in [*found[:MOST_VIOLATIONS], *more]]
    return Group(ruled_table(headers, rows, gap=1, fold="\nmember"), *lines)


def describe_layout(layout: PipelineLayout) -> str:
    """Return ``2 x 3 stages, 4 in flight, D = 1``; unequal virtual workers have ``3 + 2 stages``."""
    counts = [len(stages) for stages in layout.workers]
    equal = len(set(counts)) == 1
    stages = f"{len(counts)} x {counts[0]}" if equal else " + ".join(map(str, counts))
    # A single virtual worker waits for no other one.
    distance = f", D = {layout.distance}" if len(counts) > 1 else ""
    return f"{stages} stages, {layout.in_flight} in flight{distance}"


MOST_LAYOUTS = 4
"""Different layouts whose stages are shown."""
MOST_STAGES = 32
"""Stages of a layout that are shown."""
MOST_NAMES = 3
"""Members of a layout that are named."""


def stage_tables(plan: Plan, device: str) -> list[RenderableType]:
    """Return a table of the stages of each layout in a plan; empty if no member is a pipeline.

    Parameters
    ----------
    device : str
        Device type of the site: ``gpu`` or ``slot``.
    """
    found = _by_layout(a for planned in plan.rounds for a in planned.allocations if a.pipeline)
    parts: list[RenderableType] = []
    for names, allocation in found[:MOST_LAYOUTS]:
        parts += [_title(names, allocation), _stages(allocation, device), *_beside_gpus(allocation)]
    hidden = len(found) - MOST_LAYOUTS
    return [*parts, *([Text(f"and {hidden} more, which `--json` has", "dim")] if hidden > 0 else [])]


def _by_layout(allocations: Iterable[Allocation]) -> list[tuple[list[str], Allocation]]:
    """Return the members of each layout, and one of their allocations."""
    found: dict[object, tuple[list[str], Allocation]] = {}
    for allocation in allocations:
        names, _ = found.setdefault((allocation.pipeline, allocation.placement), ([], allocation))
        if allocation.member not in names:
            names.append(allocation.member)
    return list(found.values())


def _title(names: list[str], allocation: Allocation) -> Text:
    assert allocation.pipeline is not None
    rest = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    title = f"\nStages of {', '.join(names[:MOST_NAMES])}{rest}"
    return Text.assemble((printable(title), "bold"), f": {describe_layout(allocation.pipeline)}")


def _beside_gpus(allocation: Allocation) -> list[RenderableType]:
    """Return a line that says what a pipeline takes of the nodes' memory, if it is known."""
    layout = allocation.pipeline
    assert layout is not None
    if not any(layout.node_bytes):
        return []
    waves = ", waves and parameter servers" if len(layout.workers) > 1 else ""
    most = format_bytes(max(layout.node_bytes))
    return [Text(f"Minibatches on their way{waves} take up to {most} of a node's memory.", "dim")]


def _held(plan: StagePlan) -> str:
    return f"{plan.held}, recomputed" if plan.recomputes else str(plan.held)


def _stages(allocation: Allocation, device: str) -> Table:
    headers = (
        "virtual worker",
        ">stage",
        "layers",
        "node",
        f">{device_word(device, 1)}",
        ">minibatches held",
    )
    assert allocation.pipeline is not None
    places = [(place.node, gpu) for place in allocation.placement for gpu in place.gpus]
    rows = [
        (number if stage == 0 else "", stage, f"{plan.first}..{plan.last}", *places[plan.rank], _held(plan))
        for number, stages in enumerate(allocation.pipeline.workers)
        for stage, plan in enumerate(stages)
    ]
    more = [(f"and {len(rows) - MOST_STAGES} more", *[""] * 5)] if len(rows) > MOST_STAGES else []
    shown = (tuple(map(str, row)) for row in (*rows[:MOST_STAGES], *more))
    return ruled_table(headers, shown, gap=1, fold="node")
