"""Terminal output of pipelines: each virtual worker's stages, and the figures of all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from hetctl.report.table_style import ruled_table
from hetctl.report.units import format_bytes, format_percent, printable

PASSES = ("forward", "backward", "receive")


@dataclass(frozen=True)
class StageRow:
    """Row of the table for a stage of a virtual worker.

    Parameters
    ----------
    layers : str
        Names of the first and the last layer.
    memory_bytes : int
        Memory of its GPU in bytes.
    busy : float or None
        Share of the time in which it was busy; None without simulation.
    """

    worker: int
    gpu: str
    layers: str
    forward_s: float
    backward_s: float
    receive_s: float
    bytes: int
    memory_bytes: int
    busy: float | None


def pipeline_table(
    title: str, figures: Sequence[tuple[str, str]], rows: Sequence[StageRow]
) -> RenderableType:
    """Return a table of a plan or of its simulation.

    Parameters
    ----------
    figures : sequence of (str, str)
        Names and values of the figures of all virtual workers.
    """
    simulated = any(row.busy is not None for row in rows)
    headers = [
        ">virtual\nworker",
        "node:GPU",
        "layers",
        *(f">{name}\nms" for name in PASSES),
        ">memory",
        ">of",
    ]
    table = ruled_table(*headers, *([">busy"] if simulated else []), gap=1, fold="layers")
    before = None
    for row in rows:
        cells = [format_ms(row.forward_s), format_ms(row.backward_s), format_ms(row.receive_s)]
        cells += [format_bytes(row.bytes), format_bytes(row.memory_bytes)]
        cells += [format_percent(row.busy)] if simulated else []
        number = str(row.worker) if row.worker != before else ""
        table.add_row(number, Text(printable(row.gpu)), Text(printable(row.layers)), *cells)
        before = row.worker
    lines = Text("\n".join(f"{name}: {value}" for name, value in figures))
    return Group(Text(printable(title), "bold"), lines, Text(), table)


def format_ms(seconds: float) -> str:
    """Return a time in milliseconds with three digits and no unit, for a column that names it."""
    return f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:,.0f}"
