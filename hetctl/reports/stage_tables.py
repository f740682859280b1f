"""Tables of the stages in a plan for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hetctl.model.plan import Allocation, Plan
from hetctl.reports.pipeline_tables import describe_layout
from hetctl.reports.table_style import ruled_table
from hetctl.reports.units import device_word, format_bytes, printable

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
        parts += [_title(names, allocation), _stages(allocation, device), *_waves(allocation)]
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


def _waves(allocation: Allocation) -> list[RenderableType]:
    """Return a line that says what waves take of the nodes' memory; empty for one virtual worker."""
    assert allocation.pipeline is not None
    if not (of_nodes := allocation.pipeline.wave_bytes):
        return []
    most = format_bytes(max(of_nodes))
    return [Text(f"Waves and parameter servers take up to {most} of a node's memory.", "dim")]


def _stages(allocation: Allocation, device: str) -> Table:
    table = ruled_table(
        "virtual worker",
        ">stage",
        "layers",
        "node",
        f">{device_word(device, 1)}",
        ">minibatches held",
        gap=1,
        fold="node",
    )
    assert allocation.pipeline is not None
    places = [(place.node, gpu) for place in allocation.placement for gpu in place.gpus]
    rows = [
        (number if stage == 0 else "", stage, f"{plan.first}..{plan.last}", *places[plan.rank], plan.held)
        for number, stages in enumerate(allocation.pipeline.workers)
        for stage, plan in enumerate(stages)
    ]
    for row in rows[:MOST_STAGES]:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    if len(rows) > MOST_STAGES:
        table.add_row(f"and {len(rows) - MOST_STAGES} more", *[""] * 5)
    return table
