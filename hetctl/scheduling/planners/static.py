"""hetctl's own method: every member runs once, from start to end, on a constant number of GPUs.

The whole schedule is made at the first decision and followed from then on. A bound gives the least
number of GPUs for each member; list scheduling and its improvement give nodes and order; a solver,
OR-Tools' CP-SAT, refines schedules that are small enough for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hetctl.model.plan import Allocation, Placement
from hetctl.perf.epoch_timeline import allotment_bound, allotments_of
from hetctl.perf.rate_extrapolation import gpu_count
from hetctl.scheduling.planners.base import MEAN_JCT, Decision, Planner, Request, allocation_on
from hetctl.scheduling.planners.fixed import drawn
from hetctl.scheduling.planners.static_schedule import (
    Heads,
    Placed,
    PlacedRuns,
    Problem,
    Run,
    follow,
    in_order,
    is_even,
    placeable,
)
from hetctl.scheduling.planners.static_search import search

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


SEARCH_SHARE = 0.65
"""Share of the planning time for the search; the solver has the rest."""
AGAIN_SHARE = 0.02
"""Share of the planning time for a new plan after a change that the plan did not include."""

LEAST_BOUND_S = 1e-6
"""Smallest bound in seconds, so that shares of it are not zero."""


class Planned(NamedTuple):
    """Place of a member in the plan, in types of JSON.

    Parameters
    ----------
    start_s, end_s : float
        Times since the start of the run, in seconds.
    parts : list of [str, int]
        Nodes, with the number of GPUs on each.
    """

    name: str
    gpus: int
    start_s: float
    end_s: float
    parts: list[list[Any]]


def decide(request: Request) -> Decision:
    """Start the next members of the plan on free GPUs; make a plan first if a member is new."""
    if not request.workloads or not request.free_gpus:
        return Decision(planner_state=request.planner_state)
    waiting, started = _read(request.planner_state)
    if _is_outdated(waiting, request):
        share = 1.0 if request.planner_state is None else AGAIN_SHARE
        waiting = _planned(request, started, share * request.options.solver_time_limit_s)
    start = {allocation.member: allocation for allocation in _starts(request, waiting)}
    state = {"waiting": [[*p] for p in waiting if p.name not in start], "started": [[*p] for p in started]}
    for name, gpus, start_s, end_s, _ in (p for p in waiting if p.name in start):
        # Members may start on other nodes than planned; they hold those.
        parts = [[part.node, len(part.gpus)] for part in start[name].placement]
        state["started"].append([name, gpus, request.now_s, request.now_s + end_s - start_s, parts])
    return Decision(tuple(start.values()), planner_state=state)


def _read(state: Any) -> tuple[list[Planned], list[Planned]]:
    """Return the waiting members in the order of starts, and the started ones."""
    waiting, started = (
        [Planned(*each) for each in (state or {}).get(of, ())] for of in ("waiting", "started")
    )
    return waiting, started


def _is_outdated(waiting: Sequence[Planned], request: Request) -> bool:
    """Return true if a workload has no place in the plan, or its place is gone."""
    planned = {p.name: p for p in waiting}
    nodes = {node.name for node in request.all_nodes}
    return any(
        c.name not in planned
        or planned[c.name].gpus not in c.rates
        or any(node not in nodes for node, _ in planned[c.name].parts)
        for c in request.workloads
    )


def _planned(request: Request, started: Sequence[Planned], seconds: float) -> list[Planned]:
    """Return the plan for all workloads, with a search of about `seconds`."""
    nodes = [node.name for node in request.all_nodes if node.gpus]
    heads = _heads(request, started)
    allowed = placeable([len(head) for head in heads])
    members = tuple(allotments_of(workload, allowed) for workload in request.workloads)
    gpus, seed = sum(len(head) for head in heads), request.options.seed
    mean = request.options.objective == MEAN_JCT
    problem = Problem(members, heads, max(allotment_bound(members, gpus), LEAST_BOUND_S), mean)
    # The list of FLEET's Baseline.
    order = sorted(range(len(members)), key=lambda i: drawn(request.workloads[i], request.options))
    schedule = search(problem, [[problem.run(i, 0) for i in order]], SEARCH_SHARE * seconds, seed)
    if not problem.is_solved(problem.cost(schedule)) and can_refine(problem):
        schedule = refine(problem, schedule, (1 - SEARCH_SHARE) * seconds, seed)
    return [
        Planned(
            request.workloads[run.member].name,
            run.gpus,
            request.now_s + start_s,
            request.now_s + start_s + run.seconds,
            [[nodes[node], gpus] for node, gpus in parts],
        )
        for start_s, run, parts in schedule
    ]


def _heads(request: Request, started: Sequence[Planned]) -> Heads:
    """Return the times when GPUs become free; for held ones, the last planned ends on their node.

    The request does not name the holders of the GPUs that are not free: the members of the node with the
    latest ends count as holders.
    """
    free = {node.name: len(node.gpus) for node in request.nodes}
    ends: dict[str, list[float]] = defaultdict(list)
    for planned in started:
        for name, gpus in planned.parts:
            ends[name] += [max(planned.end_s - request.now_s, 0.0)] * gpus
    heads = []
    for node in request.all_nodes:
        held = len(node.gpus) - free.get(node.name, 0)
        # A slice from -0 would be the whole list.
        last = sorted(ends[node.name])[-held:] if held else []
        if node.gpus:
            heads.append(tuple([0.0] * (len(node.gpus) - len(last)) + last))
    return tuple(heads)


def _starts(request: Request, waiting: Sequence[Planned]) -> Iterator[Allocation]:
    """Yield the members that start now.

    Each node has a queue of members in the order of their planned starts, without overtaking. So a plan
    with correct times is followed exactly, and one with wrong times as a list. A node without waiting
    members takes the next member that fits.
    """
    workloads = {workload.name: workload for workload in request.workloads}
    free = {node.name: list(node.gpus) for node in request.nodes if node.gpus}

    def allocation(name: str, parts: Sequence[Sequence[Any]]) -> Allocation:
        placement = []
        for node, gpus in parts:
            free[node], taken = free[node][gpus:], free[node][:gpus]
            placement.append(Placement(node, tuple(taken)))
        return allocation_on(workloads[name], tuple(placement))

    left, open_, awaited = list[Planned](), set(free), set[str]()
    for planned in (p for p in waiting if p.name in workloads):
        if not open_:
            return
        nodes = {node for node, _ in planned.parts}
        if all(node in open_ and len(free[node]) >= gpus for node, gpus in planned.parts):
            yield allocation(planned.name, planned.parts)
            open_ -= {node for node in nodes if not free[node]}
        else:
            left.append(planned)
            open_ -= nodes
            awaited |= nodes
    spare = [node for node in free if node in open_ and node not in awaited]
    for planned in left if spare else ():
        fitting = [node for node in spare if len(free[node]) >= planned.gpus]
        if fitting and len(planned.parts) == 1:
            node = min(fitting, key=lambda name: len(free[name]))
            yield allocation(planned.name, [(node, planned.gpus)])


def reasons(request: Request, decision: Decision) -> Mapping[str, str]:
    """Return how many GPUs a member has until its end, and the planned starts of the others."""
    waiting, started = _read(decision.planner_state)
    now = {allocation.member for allocation in decision.start}
    later = {workload.name for workload in request.workloads}
    return {
        p.name: f"{gpu_count(p.gpus)} from start to end, until {p.end_s:.0f} s"
        for p in started
        if p.name in now
    } | {
        p.name: f"waits for {gpu_count(p.gpus)} of {', '.join(node for node, _ in p.parts)},"
        f" planned for {p.start_s:.0f} s"
        for p in waiting
        if p.name in later
    }


STATIC = Planner("static", "local", decide, reasons=reasons)


TICKS = 20_000
"""Ticks in the best makespan so far; seconds are rounded up to ticks, so that a solution is feasible."""
WORK_PER_SECOND = 0.08
"""Deterministic time of the solver per second of search: about a third of what it does in a second."""
MOST_INTERVALS = 3000
"""Largest product of members, their numbers of GPUs and nodes: above it the solver takes too long."""


def can_refine(problem: Problem) -> bool:
    """Return true if a problem is small enough for `refine`."""
    choices = sum(is_even(gpus, problem.node_size) for member in problem.members for gpus in member.gpus)
    return choices * len(problem.heads) <= MOST_INTERVALS


def refine(
    problem: Problem,
    schedule: PlacedRuns,
    seconds: float,
    seed: int,
    work_per_second: float = WORK_PER_SECOND,
) -> PlacedRuns:
    """Return a schedule that is no worse, found in at most `seconds`.

    Members get the GPUs that `schedule` gives them, or numbers that pack well; on a single node any.

    The solver uses its deterministic time, so that the same request gives the same result unless a slow
    machine reaches the wall-clock limit first.
    """
    from ortools.sat.python import cp_model

    model = IntervalModel(problem, schedule)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    # The parameter is a signed number of 32 bits.
    solver.parameters.random_seed = seed % (1 << 31)
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = work_per_second * seconds
    if solver.status_name(solver.solve(model.model)) not in ("OPTIMAL", "FEASIBLE"):
        return schedule
    return min(schedule, model.schedule(solver), key=problem.cost)


Uses = list[tuple[int, int, Any]]
"""Nodes with a number of GPUs on each, and the literals that say whether they are used."""
Option = tuple[Run, Any, Uses]
"""A run with the literal that says whether it is chosen, and its share of the nodes."""


class IntervalModel:
    """Model with an optional interval for each member, number of GPUs and node."""

    def __init__(self, problem: Problem, hint: PlacedRuns) -> None:
        from ortools.sat.python import cp_model

        self.model = cp_model.CpModel()
        self._problem = problem
        self._tick_s = max(placed.end_s for placed in hint) / TICKS
        count = len(problem.members)
        self._horizon = TICKS + count + 1
        self._starts = [self._new(f"s{i}") for i in range(count)]
        self._ends = [self._new(f"e{i}") for i in range(count)]
        self._demands: list[list[tuple[Any, int]]] = [
            [
                (self.model.new_fixed_size_interval_var(0, self._ticks(free_s), "held"), 1)
                for free_s in head
                if free_s > 0
            ]
            for head in problem.heads
        ]
        # The ticks for which a GPU is held, as far as they certainly come before the last end.
        self._area: list[Any] = [
            math.floor(min(free_s, problem.bound_s) / self._tick_s)
            for head in problem.heads
            for free_s in head
        ]
        hinted = {run.member: run.gpus for _, run, _ in hint}
        self._options = [self._add_member(member, hinted[member]) for member in range(count)]
        for head, demands in zip(problem.heads, self._demands, strict=True):
            intervals, gpus = zip(*demands, strict=True) if demands else ((), ())
            self.model.add_cumulative(intervals, gpus, len(head))
        self._add_objective()
        self._add_hint(hint)

    def _new(self, name: str) -> cp_model.IntVar:
        return self.model.new_int_var(0, self._horizon, name)

    def _ticks(self, seconds: float) -> int:
        # A whole number of ticks must not be rounded up to the next one by a floating-point error.
        return math.ceil(seconds / self._tick_s - 1e-6)

    def _add_member(self, member: int, hinted: int) -> list[Option]:
        problem, options = self._problem, list[Option]()
        for choice, gpus in enumerate(problem.members[member].gpus):
            if gpus in (hinted, 1) or len(problem.heads) == 1 or is_even(gpus, problem.node_size):
                literal = self.model.new_bool_var(f"x{member}.{gpus}")
                run = problem.run(member, choice)
                ticks = self._ticks(run.seconds)
                self._area.append(gpus * ticks * literal)
                options.append((run, literal, self._add_parts(member, gpus, ticks, literal)))
                end = self._starts[member] + ticks
                self.model.add(self._ends[member] == end).only_enforce_if(literal)
        self.model.add_exactly_one([literal for _, literal, _ in options])
        return options

    def _add_parts(self, member: int, gpus: int, ticks: int, literal: cp_model.IntVar) -> Uses:
        """Constrain a chosen run to take full nodes, and a part of another one."""
        size = self._problem.node_size
        whole, part = divmod(gpus, size)
        parts = []
        for taken, count in ((size, whole), (part, 1 if part else 0)):
            there = [
                (node, taken, self._add_interval(member, node, taken, ticks))
                for node, head in enumerate(self._problem.heads)
                if count and len(head) >= taken
            ]
            self.model.add(sum(use for _, _, use in there) == count * literal)
            parts += there
        if whole and part:
            for node in range(len(self._problem.heads)):
                self.model.add_at_most_one(use for at, _, use in parts if at == node)
        return parts

    def _add_interval(self, member: int, node: int, gpus: int, ticks: int) -> cp_model.IntVar:
        use = self.model.new_bool_var(f"y{member}.{gpus}.{node}")
        start = self._starts[member]
        interval = self.model.new_optional_fixed_size_interval_var(start, ticks, use, "run")
        self._demands[node].append((interval, gpus))
        return use

    def _add_objective(self) -> None:
        """Add the objective, and as redundant constraints the bound and the total area."""
        last = self._new("makespan")
        self.model.add_max_equality(last, self._ends)
        gpus = sum(len(head) for head in self._problem.heads)
        if self._problem.mean:
            self.model.minimize(sum(self._ends))
            return
        # Without both constraints the solver's own bound stays at 0, and it cannot prove an optimum.
        self.model.add(last >= math.floor(self._problem.bound_s / self._tick_s))
        self.model.add(sum(self._area) <= gpus * last)
        self.model.minimize(last)

    def _add_hint(self, hint: PlacedRuns) -> None:
        """Give a schedule in whole ticks as hint: rounded one by one, its runs would overlap."""
        rounded = [(Run(run.member, run.gpus, self._ticks(run.seconds)), parts) for _, run, parts in hint]
        heads = tuple(tuple(float(self._ticks(free_s)) for free_s in head) for head in self._problem.heads)
        for start, run, used in follow(rounded, heads):
            self.model.add_hint(self._starts[run.member], int(start))
            self.model.add_hint(self._ends[run.member], int(start + run.seconds))
            for option, literal, parts in self._options[run.member]:
                self.model.add_hint(literal, option.gpus == run.gpus)
                for node, taken, use in parts:
                    self.model.add_hint(use, option.gpus == run.gpus and (node, taken) in used)

    def schedule(self, solver: cp_model.CpSolver) -> PlacedRuns:
        """Return the solution, in seconds."""
        placed = []
        for run, literal, parts in (option for options in self._options for option in options):
            if solver.value(literal):
                used = tuple((node, taken) for node, taken, use in parts if solver.value(use))
                placed.append(Placed(solver.value(self._starts[run.member]) * self._tick_s, run, used))
        return in_order(placed, self._problem.heads)
