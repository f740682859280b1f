"""Terminal output of a plan's reasons, by round: allocations, and waiting members."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from hetctl.model.plan import Plan, Round
from hetctl.report.plan_table import ROUNDS_SHOWN, more_rounds
from hetctl.report.table_style import ruled_table
from hetctl.report.units import format_seconds, printable

MOST_WAITING = 6


def explain_table(plan: Plan) -> RenderableType:
    """Return tables of the reasons for allocations and waiting in a plan's first rounds."""
    parts: list[RenderableType] = []
    for planned in plan.rounds[:ROUNDS_SHOWN]:
        title = f"\nRound {planned.index}, from {format_seconds(planned.start_s)}"
        parts += [Text(title, "bold"), _reasons(planned)]
    return Group(*parts, *more_rounds(plan))


def _reasons(planned: Round) -> RenderableType:
    table = ruled_table("member", ">GPUs", "why", gap=1, fold="why")
    gpus = {allocation.member: allocation.gpus for allocation in planned.allocations}
    for member, count in gpus.items():
        table.add_row(Text(printable(member)), str(count), Text(printable(planned.reasons.get(member, ""))))
    others: dict[str, list[str]] = {}
    for member, reason in planned.reasons.items():
        if member not in gpus:
            others.setdefault(reason, []).append(member)
    for reason, (first, *rest) in list(others.items())[:MOST_WAITING]:
        also = f" +{len(rest)}" if rest else ""
        table.add_row(Text(printable(first) + also), "", Text(printable(reason)))
    hidden = sum(len(members) for members in list(others.values())[MOST_WAITING:])
    return Group(table, *([Text(f"and {hidden} more", "dim")] if hidden else []))
