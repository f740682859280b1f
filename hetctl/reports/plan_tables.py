"""A plan as sections: rounds, the member on each GPU, reasons, training modes, and sizes of jobs."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from hetctl.model.cost import Cost
from hetctl.model.job import JobSize, JobSizeOption
from hetctl.model.plan import DATA_PARALLEL, HOPPER, Phase, Plan, Round
from hetctl.model.profile import some_of
from hetctl.reports.pipeline_tables import stage_sections
from hetctl.reports.sections import Note, Section, more, stacked
from hetctl.reports.style import colours_of, ink_on
from hetctl.reports.summary import IDLE_MARK, describe_cost
from hetctl.reports.units import GUESS_NOTE, counted, device_word, format_rate, format_seconds, printable

ROUNDS_SHOWN = 20
MAP_WIDTH = 80
GAINS_SHOWN = 4
MOST_WAITING = 6
"""Reasons for waiting that are shown for a round."""
MOST_NAMES = 3
QUICKER = (
    "data-parallel would be quicker than hopping, if every node can read all of the data:"
    " --mode data-parallel plans for that"
)


def plan_tables(
    plan: Plan,
    size: JobSize,
    chosen: JobSizeOption | None,
    job_sizes: Sequence[JobSizeOption],
    device: str,
    *,
    cost: Cost | None,
    explain: bool,
    per_gpu: int,
) -> list[RenderableType]:
    """Return a plan with the size of its jobs and, to explain it, the reasons for both.

    Parameters
    ----------
    chosen : JobSizeOption or None
        Choice of the job planner; None if the user gave all values.
    job_sizes : sequence of JobSizeOption
        Sizes considered.
    device : str
        Device type of the site: ``gpu`` or ``slot``.
    cost : Cost or None
        Predicted cost of the run; None: rates of members are guesses.
    per_gpu : int
        Largest number of members on a GPU.
    """
    parts: list[RenderableType] = [plan_table(plan, device), _size_line(size, chosen, device)]
    if per_gpu > 1:
        parts += [f"up to {per_gpu} members share a {device_word(device, 1)}, if that is faster"]
    if cost:
        parts += [f"predicted cost: {describe_cost(cost, device)}"]
    if explain:
        parts += ["", explain_table(plan)]
    if explain and chosen:
        parts += ["", _sizes(chosen, job_sizes, device)]
    return parts


def plan_table(plan: Plan, device: str) -> RenderableType:
    """Return tables of a plan's first rounds: members, times, GPUs, stages, modes, and its quality.

    Parameters
    ----------
    device : str
        Device type of the site: ``gpu`` or ``slot``.
    """
    members = dict.fromkeys(a.member for planned in plan.rounds for a in planned.allocations)
    letters = itertools.chain.from_iterable(
        map("".join, itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=length))
        for length in itertools.count(1)
    )
    keys = dict(zip(members, letters, strict=False))
    parts: list[RenderableType] = [_plan_header(plan, device)]
    if plan.rounds:
        parts += [_rounds(plan, device, keys), *_maps(plan.rounds[:ROUNDS_SHOWN], keys, device)]
    parts += stage_sections(plan, device)
    return stacked([*parts, *([_phases(plan), _choices(plan)] if plan.choices else [])])


def _plan_header(plan: Plan, device: str) -> Text:
    devices = f"{plan.gpus} {device_word(device, plan.gpus)}"
    rounds = counted(len(plan.rounds), "round")
    modes = ", ".join(phase.mode for phase in plan.phases)
    # Without rounds no planner was asked: all members hop, or are pipelines.
    planned = bool(plan.rounds) or not modes
    title = f"{plan.planner} plan for {devices}: {rounds}" if planned else f"plan for {devices}: {modes}"
    best_first = sorted(plan.balance_gains.items(), key=lambda gain: -gain[1])
    gains = some_of([f"{name} {gain:.2f}" for name, gain in best_first], GAINS_SHOWN)
    known = [allocation.rate_known for planned in plan.rounds for allocation in planned.allocations]
    times = (
        f"predicted makespan {format_seconds(plan.predicted_makespan_s)},"
        f" lower bound {format_seconds(plan.lower_bound_s)}, ratio {plan.ratio:.2f}"
    )
    guesses = "no rate is known yet: times are guesses, and the run plans anew with each rate that it sees"
    return Text.assemble(
        (title, "bold"),
        f" · objective {plan.objective}\n{times if any(known) or not known else guesses}",
        f"\nchosen by auto: {plan.reason}" if plan.reason else "",
        printable(f"\ngain of balanced batches over equal ones: {gains}" if gains else ""),
    )


def _more_rounds(plan: Plan) -> list[Note]:
    hidden = len(plan.rounds) - ROUNDS_SHOWN
    return more(hidden, f"more round{'s' * (hidden != 1)}")


def _rounds(plan: Plan, device: str, keys: Mapping[str, str]) -> Section:
    times = (">round", ">start", ">length")
    headers = (*times, "key", "member", f">{device_word(device)}", ">samples/s", ">done at")
    rows = []
    last = {a.member: planned.index for planned in plan.rounds for a in planned.allocations}
    done = {(f.member, last.get(f.member)): format_seconds(f.done_s) for f in plan.members}
    for planned in plan.rounds[:ROUNDS_SHOWN]:
        heads = [str(planned.index), format_seconds(planned.start_s), format_seconds(planned.predicted_s)]
        for allocation in planned.allocations:
            name = allocation.member
            gpus, rate = str(allocation.gpus), format_rate(allocation.rate, known=allocation.rate_known)
            rows.append((*heads, keys[name], name, gpus, rate, done.get((name, planned.index), "")))
            heads = ["", "", ""]
    has_guess = any(not a.rate_known for planned in plan.rounds for a in planned.allocations)
    notes = [*_more_rounds(plan), *([(GUESS_NOTE, "dim")] if has_guess else [])]
    return Section(headers=headers, rows=rows, fold="member", notes=notes)


def _maps(rounds: Sequence[Round], keys: Mapping[str, str], device: str) -> Iterator[Section]:
    """Yield maps with nodes as rows and rounds as columns, as many rounds to a block as fit `MAP_WIDTH`."""
    sizes: dict[str, int] = {}
    for placement in (p for planned in rounds for a in planned.allocations for p in a.placement):
        sizes[placement.node] = max(sizes.get(placement.node, 0), *(gpu + 1 for gpu in placement.gpus))
    if not sizes:
        return
    width = max(map(len, keys.values())) + any(
        p.seat for planned in rounds for a in planned.allocations for p in a.placement
    )
    styles = {member: f"{ink_on(colour)} on {colour}" for member, colour in colours_of(keys).items()}

    def mark(members: Sequence[str]) -> Text:
        if not members:
            return Text(IDLE_MARK.ljust(width), "dim")
        first, *beside = members
        return Text((keys[first] + "+" * bool(beside)).ljust(width), styles[first])

    cell = max(max(sizes.values()) * (width + 1) - 1, len("round 99"))
    per_block = max(1, (MAP_WIDTH - max(len("node"), *map(len, sizes))) // (cell + 2))
    title = f"Member on each {device_word(device, 1)} of a node, by round ({IDLE_MARK} idle)"
    for first in range(0, len(rounds), per_block):
        block = rounds[first : first + per_block]
        held = [_members_by_gpu(planned) for planned in block]
        yield Section(
            title if first == 0 else "",
            headers=("node", *(f"round {planned.index}" for planned in block)),
            rows=[
                (
                    node,
                    *(Text(" ").join(mark(by_gpu[node, gpu]) for gpu in range(size)) for by_gpu in held),
                )
                for node, size in sizes.items()
            ],
        )


def _members_by_gpu(planned: Round) -> Mapping[tuple[str, int], Sequence[str]]:
    found: dict[tuple[str, int], list[str]] = defaultdict(list)
    for allocation in planned.allocations:
        for place in allocation.placement:
            for gpu in place.gpus:
                found[place.node, gpu].append(allocation.member)
    return found


def explain_table(plan: Plan) -> RenderableType:
    """Return tables of the reasons for allocations and waiting in a plan's first rounds."""
    rest = [Section(notes=notes)] if (notes := _more_rounds(plan)) else []
    return stacked([*map(_reasons, plan.rounds[:ROUNDS_SHOWN]), *rest])


def _reasons(planned: Round) -> Section:
    gpus = {allocation.member: allocation.gpus for allocation in planned.allocations}
    rows = [(member, str(count), planned.reasons.get(member, "")) for member, count in gpus.items()]
    others: dict[str, list[str]] = {}
    for member, reason in planned.reasons.items():
        if member not in gpus:
            others.setdefault(reason, []).append(member)
    for reason, (first, *rest) in list(others.items())[:MOST_WAITING]:
        rows.append((f"{first} +{len(rest)}" if rest else first, "", reason))
    hidden = sum(len(members) for members in list(others.values())[MOST_WAITING:])
    return Section(
        f"Round {planned.index}, from {format_seconds(planned.start_s)}",
        headers=("member", ">GPUs", "reason"),
        rows=rows,
        fold="reason",
        notes=more(hidden, "more"),
    )


def _phases(plan: Plan) -> Section:
    rows = [
        (
            *(phase.mode, str(len(phase.members))),
            *map(format_seconds, (phase.start_s, phase.predicted_s)),
            ", ".join(
                f"{mode} {format_seconds(seconds)}"
                for mode, seconds in phase.makespans_s.items()
                if mode != phase.mode
            ),
        )
        for phase in plan.phases
    ]
    headers = ("mode", ">members", ">start", ">length", "other modes")
    notes = [(QUICKER, "dim")] if any(map(_would_be_quicker, plan.phases)) else []
    return Section("Phases", headers=headers, rows=rows, fold="other modes", notes=notes)


def _would_be_quicker(phase: Phase) -> bool:
    """Return true if members hop although data-parallel training is faster in the simulator."""
    return phase.mode == HOPPER and phase.makespans_s.get(DATA_PARALLEL, math.inf) < phase.predicted_s


def _choices(plan: Plan) -> Section:
    """Return a line for each mode and reason, with the members that train so."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for choice in plan.choices:
        by_reason.setdefault((choice.mode, choice.reason), []).append(choice.member)
    rows = [(mode, some_of(members, MOST_NAMES), reason) for (mode, reason), members in by_reason.items()]
    headers = ("mode", "members", "reason")
    return Section("Modes", headers=headers, rows=rows, fold=("members", "reason"))


def _size_line(size: JobSize, chosen: JobSizeOption | None, device: str) -> str:
    what = f"{counted(size.nodes, 'node')} ({size.gpus} {device_word(device, size.gpus)})"
    line = f"each job: {what} for {format_seconds(size.wall_s)} in queue {size.queue.name}"
    return f"{line}; {counted(chosen.jobs, 'job')} expected" if chosen else line


def _sizes(chosen: JobSizeOption, job_sizes: Sequence[JobSizeOption], device: str) -> Section:
    """Return a table of the sizes considered; an arrow marks the choice."""
    hours = f">{device_word(device, 1)}-hours"
    rows = [
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
    ]
    headers = ("", "queue", ">nodes", ">time limit", ">jobs", ">makespan", hours)
    return Section("Sizes of a job", headers=headers, rows=rows)
