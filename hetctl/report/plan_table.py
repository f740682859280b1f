"""Terminal output of a plan: its rounds, and the member on each GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetctl.model.plan import Plan, Round
from hetctl.report.palette import colours_of, ink_on
from hetctl.report.summary import IDLE_MARK
from hetctl.report.table_style import ruled_table
from hetctl.report.units import device_word, format_rate, format_seconds, printable

ROUNDS_SHOWN = 20
MAP_WIDTH = 80


def plan_table(plan: Plan, device: str) -> RenderableType:
    """Return tables of a plan's first rounds: members, times, GPUs, and the quality of the plan.

    Parameters
    ----------
    device : str
        Device type of the site: ``gpu`` or ``slot``.
    """
    members = dict.fromkeys(a.member for planned in plan.rounds for a in planned.allocations)
    keys = dict(zip(members, _letters(), strict=False))
    parts: list[RenderableType] = [_header(plan, device)]
    if plan.rounds:
        parts += [Text(), _round_table(plan, device, keys), *more_rounds(plan)]
    if keys:
        title = f"Member on each {device_word(device, 1)} of a node, by round ({IDLE_MARK} idle)"
        parts += [Text(), Text(title, "bold"), *_maps(plan.rounds[:ROUNDS_SHOWN], keys)]
    return Group(*parts)


def _letters() -> Iterator[str]:
    """Yield a, b, .. z, aa, ab, .. without end."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=length))


def _header(plan: Plan, device: str) -> Text:
    devices = f"{plan.gpus} {device_word(device, plan.gpus)}"
    rounds = f"{len(plan.rounds)} round{'s' * (len(plan.rounds) != 1)}"
    return Text.assemble(
        (f"{plan.planner} plan for {devices}: {rounds}", "bold"),
        f" · objective {plan.objective}\npredicted makespan {format_seconds(plan.predicted_makespan_s)}",
        f", lower bound {format_seconds(plan.lower_bound_s)}, ratio {plan.ratio:.2f}",
        f"\nchosen by auto: {plan.why}" if plan.why else "",
    )


def more_rounds(plan: Plan) -> list[RenderableType]:
    """Return a line with the number of rounds that are not shown, if any."""
    hidden = len(plan.rounds) - ROUNDS_SHOWN
    return [Text(f"and {hidden} more round{'s' * (hidden != 1)}", "dim")] if hidden > 0 else []


def _round_table(plan: Plan, device: str, keys: Mapping[str, str]) -> Table:
    headers = (
        ">round",
        ">start",
        ">length",
        "key",
        "member",
        f">{device_word(device)}",
        ">samples/s",
        ">done at",
    )
    table = ruled_table(*headers, gap=1, fold="member")
    last = {a.member: planned.index for planned in plan.rounds for a in planned.allocations}
    done = {(f.member, last.get(f.member)): format_seconds(f.done_s) for f in plan.members}
    for planned in plan.rounds[:ROUNDS_SHOWN]:
        heads = [str(planned.index), format_seconds(planned.start_s), format_seconds(planned.predicted_s)]
        for allocation in planned.allocations:
            name = allocation.member
            table.add_row(
                *heads,
                keys[name],
                Text(printable(name)),
                str(allocation.gpus),
                format_rate(allocation.rate),
                done.get((name, planned.index), ""),
            )
            heads = ["", "", ""]
    return table


def _maps(rounds: Sequence[Round], keys: Mapping[str, str]) -> list[RenderableType]:
    """Return maps with nodes as rows and rounds as columns, as many rounds to a block as fit `MAP_WIDTH`."""
    sizes: dict[str, int] = {}
    for placement in (p for planned in rounds for a in planned.allocations for p in a.placement):
        sizes[placement.node] = max(sizes.get(placement.node, 0), *(gpu + 1 for gpu in placement.gpus))
    if not sizes:
        return []
    cell = max(max(sizes.values()) * (_width(keys) + 1) - 1, len("round 99"))
    per_block = max(1, (MAP_WIDTH - max(len("node"), *map(len, sizes))) // (cell + 2))
    blocks = [rounds[i : i + per_block] for i in range(0, len(rounds), per_block)]
    return [_map(block, sizes, keys) for block in blocks]


def _map(rounds: Sequence[Round], sizes: Mapping[str, int], keys: Mapping[str, str]) -> Table:
    table = ruled_table("node", *(f"round {planned.index}" for planned in rounds), gap=1)
    colours = colours_of(keys)
    held = [_holders(planned) for planned in rounds]
    for node, size in sizes.items():
        cells = [[holders.get((node, gpu)) for gpu in range(size)] for holders in held]
        table.add_row(Text(printable(node)), *(_cell(members, keys, colours) for members in cells))
    return table


def _holders(planned: Round) -> dict[tuple[str, int], str]:
    return {(p.node, gpu): a.member for a in planned.allocations for p in a.placement for gpu in p.gpus}


def _cell(members: Sequence[str | None], keys: Mapping[str, str], colours: Mapping[str, str]) -> Text:
    width = _width(keys)
    styles = {member: f"{ink_on(colour)} on {colour}" for member, colour in colours.items()}
    marks = [
        Text(keys[member].ljust(width), styles[member]) if member else Text(IDLE_MARK.ljust(width), "dim")
        for member in members
    ]
    return Text(" ").join(marks)


def _width(keys: Mapping[str, str]) -> int:
    return max(map(len, keys.values()))
