"""Terminal output of balanced batches: distance from the optimum, convergence, and samples by worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetctl.report.table_style import ruled_table
from hetctl.report.units import NONE, format_seconds, printable


class PhaseFields(TypedDict):
    """Fields of a phase to display, as in the JSON."""

    first: int
    last: int
    t_star_s: float
    best_batches: Sequence[int]
    equal_s: float
    steady_s: float
    ratio: float
    reached_at: int | None


class IterationFields(TypedDict):
    """Fields of an iteration to display, as in the JSON."""

    batches: Sequence[int]


class BalanceFields(TypedDict):
    """Fields of a simulation to display, as in the JSON."""

    algorithm: str
    predictor: str | None
    batch: int
    workers: Sequence[str]
    seconds: float
    phases: Sequence[PhaseFields]
    iterations: Sequence[IterationFields]
    warnings: Sequence[str]


def balance_table(fields: BalanceFields) -> RenderableType:
    """Return a table of the phases, and of the batches at their ends beside the best ones."""
    parts: list[RenderableType] = [_header(fields), Text(), _phase_table(fields["phases"])]
    parts += [Text(), Text("batches at the start, and at the end of each phase beside the best", "bold")]
    parts += [_batch_table(fields)]
    parts += [Text(printable(f"warning: {warning}"), "yellow") for warning in fields["warnings"]]
    return Group(*parts)


def _header(fields: BalanceFields) -> Text:
    how = fields["algorithm"] + (f" with {fields['predictor']}" if fields["predictor"] else "")
    count = len(fields["iterations"])
    return Text.assemble(
        (f"{how}: {fields['batch']:,} samples on {len(fields['workers'])} workers", "bold"),
        f"\n{count:,} iterations in {format_seconds(fields['seconds'])}",
    )


def _phase_table(phases: Sequence[PhaseFields]) -> Table:
    table = ruled_table(
        ">iterations", ">equal\nbatches", ">steady", ">t*", ">ratio", ">within 5 %\nafter", gap=1
    )
    for phase in phases:
        reached = phase["reached_at"]
        table.add_row(
            f"{phase['first']} to {phase['last']}",
            f"{phase['equal_s']:.4g} s",
            f"{phase['steady_s']:.4g} s",
            f"{phase['t_star_s']:.4g} s",
            f"{phase['ratio']:.3f}",
            NONE if reached is None else str(reached - phase["first"]),
        )
    return table


def _batch_table(fields: BalanceFields) -> Table:
    phases, iterations = fields["phases"], fields["iterations"]
    headers = [header for phase in phases for header in (f">{phase['last']}", ">best")]
    table = ruled_table("worker", ">0", *headers, gap=1, fold="worker")
    columns = [iterations[0]["batches"]]
    for phase in phases:
        columns += [iterations[phase["last"]]["batches"], phase["best_batches"]]
    for name, *batches in zip(fields["workers"], *columns, strict=True):
        table.add_row(Text(printable(name)), *(f"{batch:,}" for batch in batches))
    return table
