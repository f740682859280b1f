"""Terminal output of training modes: the phases with their times, and the reasons for the modes."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.text import Text

from hetctl.model.plan import DATA_PARALLEL, HOPPER, Phase, Plan
from hetctl.report.table_style import ruled_table
from hetctl.report.units import format_seconds, printable

MOST_NAMES = 3
QUICKER = (
    "data-parallel would be quicker than hopping, if every node can read all of the data:"
    " --mode data-parallel plans for that"
)


def mode_table(plan: Plan) -> RenderableType:
    """Return tables of a plan's phases, and of the choices; members with the same reason are in one row."""
    notes = [Text(QUICKER, "dim")] if any(map(_would_be_quicker, plan.phases)) else []
    parts = [Text("\nPhases", "bold"), _phases(plan), *notes]
    return Group(*parts, Text("\nModes", "bold"), _choices(plan))


def _would_be_quicker(phase: Phase) -> bool:
    """Return true if members hop although data-parallel training is faster in the simulator."""
    return phase.mode == HOPPER and phase.prices.get(DATA_PARALLEL, math.inf) < phase.predicted_s


def _phases(plan: Plan) -> RenderableType:
    table = ruled_table(
        "mode", ">members", ">start", ">length", "simulated instead", gap=1, fold="simulated instead"
    )
    for phase in plan.phases:
        start, length = format_seconds(phase.start_s), format_seconds(phase.predicted_s)
        table.add_row(phase.mode, str(len(phase.members)), start, length, _others(phase))
    return table


def _others(phase: Phase) -> str:
    """Return a text on the same members' times in other modes."""
    others = {mode: seconds for mode, seconds in phase.prices.items() if mode != phase.mode}
    return ", ".join(f"{mode} {format_seconds(seconds)}" for mode, seconds in others.items())


def _choices(plan: Plan) -> RenderableType:
    table = ruled_table("mode", "members", "why", gap=1, fold="why")
    by_reason: dict[tuple[str, str], list[str]] = {}
    for choice in plan.choices:
        by_reason.setdefault((choice.mode, choice.why), []).append(choice.member)
    for (mode, why), members in by_reason.items():
        table.add_row(mode, Text(_listed(members)), Text(printable(why)))
    return table


def _listed(members: list[str]) -> str:
    shown = ", ".join(printable(member) for member in members[:MOST_NAMES])
    return shown + (f" +{len(members) - MOST_NAMES}" if len(members) > MOST_NAMES else "")
