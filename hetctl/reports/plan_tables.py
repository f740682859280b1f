"""Terminal output of a plan: rounds, member on each GPU, reasons, training modes, and sizes of jobs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetctl.model.job import JobSize, JobSizeOption
from hetctl.model.plan import DATA_PARALLEL, HOPPER, Phase, Plan, Round
from hetctl.reports.pipeline_tables import stage_tables
from hetctl.reports.style import colours_of, ink_on, ruled_table
from hetctl.reports.summary import IDLE_MARK
from hetctl.reports.units import device_word, format_rate, format_seconds, printable

ROUNDS_SHOWN = 20
MAP_WIDTH = 80
GAINS_SHOWN = 4


def plan_table(plan: Plan, device: str) -> RenderableType:
    """Return tables of a plan's first rounds: members, times, GPUs, stages, and the quality of the plan.

    Parameters
    ----------
    device : str
        Device type of the site: ``gpu`` or ``slot``.
    """
    members = dict.fromkeys(a.member for planned in plan.rounds for a in planned.allocations)
    keys = dict(zip(members, _letters(), strict=False))
    parts: list[RenderableType] = [_plan_header(plan, device)]
    if plan.rounds:
        parts += [Text(), _round_table(plan, device, keys), *more_rounds(plan)]
    if keys:
        title = f"Member on each {device_word(device, 1)} of a node, by round ({IDLE_MARK} idle)"
        parts += [Text(), Text(title, "bold"), *_maps(plan.rounds[:ROUNDS_SHOWN], keys)]
    return Group(*parts, *stage_tables(plan, device))


def _letters() -> Iterator[str]:
    """Yield a, b, .. z, aa, ab, .. without end."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=length))


def _plan_header(plan: Plan, device: str) -> Text:
    devices = f"{plan.gpus} {device_word(device, plan.gpus)}"
    rounds = f"{len(plan.rounds)} round{'s' * (len(plan.rounds) != 1)}"
    modes = ", ".join(phase.mode for phase in plan.phases)
    # Without rounds no planner was asked: all members hop, or are pipelines.
    planned = bool(plan.rounds) or not modes
    title = f"{plan.planner} plan for {devices}: {rounds}" if planned else f"plan for {devices}: {modes}"
    return Text.assemble(
        (title, "bold"),
        f" · objective {plan.objective}\npredicted makespan {format_seconds(plan.predicted_makespan_s)}",
        f", lower bound {format_seconds(plan.lower_bound_s)}, ratio {plan.ratio:.2f}",
        f"\nchosen by auto: {plan.reason}" if plan.reason else "",
        printable(_balance_line(plan.balance_gains)),
    )


def _balance_line(gains: Mapping[str, float]) -> str:
    """Return a line on members with balanced batches, the largest gain first; empty if there are none."""
    if not gains:
        return ""
    order = sorted(gains, key=lambda name: -gains[name])
    shown = ", ".join(f"{name} {gains[name]:.2f}" for name in order[:GAINS_SHOWN])
    rest = f" and {len(order) - GAINS_SHOWN} more" if len(order) > GAINS_SHOWN else ""
    return f"\ngain of balanced batches over equal ones: {shown}{rest}"


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
    rows = []
    last = {a.member: planned.index for planned in plan.rounds for a in planned.allocations}
    done = {(f.member, last.get(f.member)): format_seconds(f.done_s) for f in plan.members}
    for planned in plan.rounds[:ROUNDS_SHOWN]:
        heads = [str(planned.index), format_seconds(planned.start_s), format_seconds(planned.predicted_s)]
        for allocation in planned.allocations:
            name = allocation.member
            gpus, rate = str(allocation.gpus), format_rate(allocation.rate)
            rows.append((*heads, keys[name], name, gpus, rate, done.get((name, planned.index), "")))
            heads = ["", "", ""]
    return ruled_table(headers, rows, gap=1, fold="member")


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
    colours = colours_of(keys)
    held = [_holders(planned) for planned in rounds]
    rows: list[Sequence[str | Text]] = []
    for node, size in sizes.items():
        cells = [[holders.get((node, gpu)) for gpu in range(size)] for holders in held]
        rows.append((node, *(_cell(members, keys, colours) for members in cells)))
    return ruled_table(("node", *(f"round {planned.index}" for planned in rounds)), rows, gap=1)


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


MOST_WAITING = 6


def explain_table(plan: Plan) -> RenderableType:
    """Return tables of the reasons for allocations and waiting in a plan's first rounds."""
    parts: list[RenderableType] = []
    for planned in plan.rounds[:ROUNDS_SHOWN]:
        title = f"\nRound {planned.index}, from {format_seconds(planned.start_s)}"
        parts += [Text(title, "bold"), _reasons(planned)]
    return Group(*parts, *more_rounds(plan))


def _reasons(planned: Round) -> RenderableType:
    gpus = {allocation.member: allocation.gpus for allocation in planned.allocations}
    rows = [(member, str(count), planned.reasons.get(member, "")) for member, count in gpus.items()]
    others: dict[str, list[str]] = {}
    for member, reason in planned.reasons.items():
        if member not in gpus:
            others.setdefault(reason, []).append(member)
    for reason, (first, *rest) in list(others.items())[:MOST_WAITING]:
        rows.append((f"{first} +{len(rest)}" if rest else first, "", reason))
    hidden = sum(len(members) for members in list(others.values())[MOST_WAITING:])
    table = ruled_table(("member", ">GPUs", "reason"), rows, gap=1, fold="reason")
    return Group(table, *([Text(f"and {hidden} more", "dim")] if hidden else []))


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
    return phase.mode == HOPPER and phase.makespans_s.get(DATA_PARALLEL, math.inf) < phase.predicted_s


def _phases(plan: Plan) -> RenderableType:
    rows = (
        (
            *(phase.mode, str(len(phase.members))),
            *map(format_seconds, (phase.start_s, phase.predicted_s)),
            _others(phase),
        )
        for phase in plan.phases
    )
    headers = ("mode", ">members", ">start", ">length", "other modes")
    return ruled_table(headers, rows, gap=1, fold="other modes")


def _others(phase: Phase) -> str:
    """Return a text on the same members' times in other modes."""
    others = {mode: seconds for mode, seconds in phase.makespans_s.items() if mode != phase.mode}
    return ", ".join(f"{mode} {format_seconds(seconds)}" for mode, seconds in others.items())


def _choices(plan: Plan) -> RenderableType:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for choice in plan.choices:
        by_reason.setdefault((choice.mode, choice.reason), []).append(choice.member)
    rows = ((mode, _listed(members), reason) for (mode, reason), members in by_reason.items())
    return ruled_table(("mode", "members", "reason"), rows, gap=1, fold=("members", "reason"))


def _listed(members: list[str]) -> str:
    shown = ", ".join(members[:MOST_NAMES])
    return shown + (f" +{len(members) - MOST_NAMES}" if len(members) > MOST_NAMES else "")


def size_line(size: JobSize, chosen: JobSizeOption | None, device: str) -> RenderableType:
    """Return a line on the resources of each job.

    Parameters
    ----------
    chosen : JobSizeOption or None
        Choice of the job planner; None if the user gave all values.
    """
    what = f"{size.nodes} node{'s' * (size.nodes != 1)} ({size.gpus} {device_word(device, size.gpus)})"
    line = f"each job: {what} for {format_seconds(size.wall_s)} in queue {size.queue.name}"
    if chosen is None:
        return Text(line)
    jobs = f"{chosen.jobs} job{'s' * (chosen.jobs != 1)}"
    return Text(f"{line}; {jobs} and {chosen.gpu_hours:.3g} {device_word(device, 1)}-hours expected")


def size_table(chosen: JobSizeOption, job_sizes: Sequence[JobSizeOption], device: str) -> RenderableType:
    """Return a table of the sizes considered; an arrow marks the choice."""
    hours = f">{device_word(device, 1)}-hours"
    headers = ("", "queue", ">nodes", ">time limit", ">jobs", ">makespan", hours)
    rows = (
        (
            "→" if option == chosen else "",
            option.size.queue.name,
            str(option.size.nodes),
            format_seconds(option.size.wall_s),
            str(option.jobs),
            format_seconds(option.makespan_s),
            f"{option.gpu_hours:.3g}",
        )
        for option in job_sizes
    )
    return Group(Text("\nSizes of a job", "bold"), ruled_table(headers, rows, gap=1))
