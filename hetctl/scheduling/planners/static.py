"""hetctl's own method: every member runs once, from start to end, on a constant number of GPUs.

The whole schedule is made at the first decision and followed from then on. A bound gives the least
number of GPUs for each member; list scheduling and its improvement give nodes and order; a solver,
OR-Tools' CP-SAT, refines schedules that are small enough for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.perf.epoch_timeline import allotment_bound, allotments_of
from hetctl.scheduling.planners.base import MEAN_JCT, Decision, Planner, Request, gpu_count
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

LEAST_S = 1e-6
"""Smallest bound in seconds, so that shares of it are not zero."""


@dataclass(frozen=True)
class Planned:
    """Place of a member in the plan.

    Parameters
    ----------
    start_s, end_s : float
        Times since the start of the run, in seconds.
    parts : tuple of (str, int)
        Nodes, with the number of GPUs on each.
    """

    name: str
    gpus: int
    start_s: float
    end_s: float
    parts: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class StaticState:
    """The plan: the waiting members in the order of starts, and the started ones."""

    waiting: tuple[Planned, ...] = ()
    started: tuple[Planned, ...] = ()


def decide(request: Request) -> Decision:
    """Start the next members of the plan on free GPUs; make a plan first if a member is new."""
    if not request.workloads or not request.free_gpus:
        return Decision(planner_state=request.planner_state)
    state = _read(request.planner_state)
    if _is_outdated(state, request):
        first = request.planner_state is None
        state = _planned(
            request, state, request.options.solver_time_limit_s * (1.0 if first else AGAIN_SHARE)
        )
    start = _Following(request, state).start()
    return Decision(tuple(start.values()), planner_state=_write(_after(state, start, request.now_s)))


def _is_outdated(state: StaticState, request: Request) -> bool:
    """Return true if a workload has no place in the plan, or its place does not exist any more."""
    planned = {p.name: p for p in state.waiting}
    nodes = {node.name for node in request.all_nodes}
    return any(
        c.name not in planned
        or planned[c.name].gpus not in c.rates
        or any(node not in nodes for node, _ in planned[c.name].parts)
        for c in request.workloads
    )


def _planned(request: Request, state: StaticState, seconds: float) -> StaticState:
    """Return the plan for all workloads, with a search of about `seconds`."""
    nodes = [node for node in request.all_nodes if node.gpus]
    heads = _heads(request, state)
    allowed = placeable([len(head) for head in heads])
    members = tuple(allotments_of(workload, allowed) for workload in request.workloads)
    gpus = sum(len(head) for head in heads)
    mean = request.options.objective == MEAN_JCT
    problem = Problem(members, heads, max(allotment_bound(members, gpus), LEAST_S), mean)
    schedule = search(problem, [_independent(problem, request)], SEARCH_SHARE * seconds, request.options.seed)
    if not problem.is_solved(problem.cost(schedule)) and can_refine(problem):
        schedule = refine(problem, schedule, (1 - SEARCH_SHARE) * seconds, request.options.seed)
    return StaticState(_named(schedule, request, [node.name for node in nodes]), state.started)


def _independent(problem: Problem, request: Request) -> list[Run]:
    """Return the list of FLEET's Baseline."""
    members = sorted(range(len(problem.members)), key=lambda i: drawn(request.workloads[i], request.options))
    return [problem.run(member, 0) for member in members]


def _named(schedule: PlacedRuns, request: Request, nodes: Sequence[str]) -> tuple[Planned, ...]:
    now_s = request.now_s
    return tuple(
        Planned(
            request.workloads[run.member].name,
            run.gpus,
            now_s + start_s,
            now_s + start_s + run.seconds,
            tuple((nodes[node], gpus) for node, gpus in parts),
        )
        for start_s, run, parts in schedule
    )


def _heads(request: Request, state: StaticState) -> Heads:
    """Return the times when GPUs become free; held ones by the last planned ends on their node.

    The request does not name the holders, but all GPUs that are not free are held; the members of the
    node with the latest ends are taken as holders.
    """
    free = {node.name: len(node.gpus) for node in request.nodes}
    ends: dict[str, list[float]] = defaultdict(list)
    for planned in state.started:
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


class _Following:
    """Selection of the members that start now.

    Each node has a queue of members in the order of their planned starts, without overtaking. So a plan
    with correct times is followed exactly, and one with wrong times as a list. A node without waiting
    members takes the next member that fits.
    """

    def __init__(self, request: Request, state: StaticState) -> None:
        self._workloads = {workload.name: workload for workload in request.workloads}
        self._free = {node.name: list(node.gpus) for node in request.nodes if node.gpus}
        self._waiting = [p for p in state.waiting if p.name in self._workloads]
        self._size = max(len(node.gpus) for node in request.all_nodes)

    def start(self) -> dict[str, Allocation]:
        """Return allocations by member."""
        started = {}
        left = []
        open_, awaited = set(self._free), set()
        for at, planned in enumerate(self._waiting):
            if not open_:
                left += self._waiting[at:]
                break
            if all(node in open_ and len(self._free[node]) >= gpus for node, gpus in planned.parts):
                started[planned.name] = self._allocation(planned, planned.parts)
                open_ -= {node for node, _ in planned.parts if not self._free[node]}
            else:
                left.append(planned)
                open_ -= {node for node, _ in planned.parts}
                awaited |= {node for node, _ in planned.parts}
        spare = [node for node in self._free if node in open_ and node not in awaited]
        return started | self._on_spare(spare, left)

    def _on_spare(self, nodes: Sequence[str], left: Sequence[Planned]) -> dict[str, Allocation]:
        started = {}
        for planned in left:
            fitting = [node for node in nodes if len(self._free[node]) >= planned.gpus]
            if fitting and len(planned.parts) == 1:
                node = min(fitting, key=lambda name: len(self._free[name]))
                started[planned.name] = self._allocation(planned, ((node, planned.gpus),))
        return started

    def _allocation(self, planned: Planned, parts: Sequence[tuple[str, int]]) -> Allocation:
        placement = []
        for node, gpus in parts:
            self._free[node], taken = self._free[node][gpus:], self._free[node][:gpus]
            placement.append(Placement(node, tuple(taken)))
        rate = self._workloads[planned.name].rates[planned.gpus]
        return Allocation(planned.name, planned.gpus, DATA_PARALLEL, rate, tuple(placement))


def _after(state: StaticState, start: Mapping[str, Allocation], now_s: float) -> StaticState:
    """Return the plan after those starts, with the nodes on which members were really started."""
    started = tuple(
        Planned(
            p.name,
            p.gpus,
            now_s,
            now_s + p.end_s - p.start_s,
            tuple((part.node, len(part.gpus)) for part in start[p.name].placement),
        )
        for p in state.waiting
        if p.name in start
    )
    waiting = tuple(p for p in state.waiting if p.name not in start)
    return StaticState(waiting, state.started + started)


def _write(state: StaticState) -> Any:
    return {
        name: [[p.name, p.gpus, p.start_s, p.end_s, [list(part) for part in p.parts]] for p in those]
        for name, those in (("waiting", state.waiting), ("started", state.started))
    }


def _read(state: Any) -> StaticState:
    def those(name: str) -> tuple[Planned, ...]:
        return tuple(
            Planned(member, gpus, start_s, end_s, tuple((node, count) for node, count in parts))
            for member, gpus, start_s, end_s, parts in state[name]
        )

    return StaticState(those("waiting"), those("started")) if state else StaticState()


def reasons(request: Request, decision: Decision) -> Mapping[str, str]:
    """Return how many GPUs a member has until its end, and the planned starts of the others."""
    plan = _read(decision.planner_state)
    started = {allocation.member for allocation in decision.start}
    said = {p.name: _reason_now(p) for p in plan.started if p.name in started}
    waiting = {workload.name for workload in request.workloads}
    return said | {p.name: _reason_later(p) for p in plan.waiting if p.name in waiting}


def _reason_now(planned: Planned) -> str:
    return f"{gpu_count(planned.gpus)} from start to end, until {planned.end_s:.0f} s"


def _reason_later(planned: Planned) -> str:
    nodes = ", ".join(node for node, _ in planned.parts)
    return f"waits for {gpu_count(planned.gpus)} of {nodes}, planned for {planned.start_s:.0f} s"


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


class IntervalModel:
    """Model with an optional interval for each member, number of GPUs and node."""

    def __init__(self, problem: Problem, hint: PlacedRuns) -> None:
        from ortools.sat.python import cp_model

        self.model = cp_model.CpModel()
        self._problem = problem
        last_s = max(placed.end_s for placed in hint)
        self._tick_s = last_s / TICKS
        self._hinted = {run.member: run.gpus for _, run, _ in hint}
        self._horizon = TICKS + len(problem.members) + 1
        self._options: list[list[tuple[int, Any, list[tuple[int, int, Any]]]]] = []
        self._starts = [self._new(f"s{i}") for i in range(len(problem.members))]
        self._ends = [self._new(f"e{i}") for i in range(len(problem.members))]
        self._demands: list[list[tuple[Any, int]]] = [self._busy(head) for head in problem.heads]
        self._area: list[Any] = [self._held(free_s) for head in problem.heads for free_s in head]
        for member in range(len(problem.members)):
            self._add_member(member)
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

    def _held(self, free_s: float) -> int:
        """Return the ticks for which a GPU is held, as far as they certainly come before the last end."""
        return math.floor(min(free_s, self._problem.bound_s) / self._tick_s)

    def _busy(self, head: tuple[float, ...]) -> list[tuple[Any, int]]:
        return [
            (self.model.new_fixed_size_interval_var(0, self._ticks(free_s), "held"), 1)
            for free_s in head
            if free_s > 0
        ]

    def _add_member(self, member: int) -> None:
        chosen = []
        options = []
        for choice, gpus in enumerate(self._problem.members[member].gpus):
            if gpus not in (self._hinted[member], 1) and not self._may_have(gpus):
                continue
            literal = self.model.new_bool_var(f"x{member}.{gpus}")
            chosen.append(literal)
            ticks = self._ticks(self._problem.members[member].seconds[choice])
            self._area.append(gpus * ticks * literal)
            options.append((choice, literal, self._add_parts(member, gpus, ticks, literal)))
            end = self._starts[member] + ticks
            self.model.add(self._ends[member] == end).only_enforce_if(literal)
        self.model.add_exactly_one(chosen)
        self._options.append(options)

    def _may_have(self, gpus: int) -> bool:
        return len(self._problem.heads) == 1 or is_even(gpus, self._problem.node_size)

    def _add_parts(
        self, member: int, gpus: int, ticks: int, literal: cp_model.IntVar
    ) -> list[tuple[int, int, Any]]:
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
            gpus = self._problem.members[run.member].gpus
            for choice, literal, parts in self._options[run.member]:
                self.model.add_hint(literal, gpus[choice] == run.gpus)
                for node, taken, use in parts:
                    self.model.add_hint(use, gpus[choice] == run.gpus and (node, taken) in used)

    def schedule(self, solver: cp_model.CpSolver) -> PlacedRuns:
        """Return the solution, in seconds."""
        placed = []
        for member, options in enumerate(self._options):
            for choice, _, parts in options:
                used = tuple((node, taken) for node, taken, use in parts if solver.value(use))
                if used:
                    start_s = solver.value(self._starts[member]) * self._tick_s
                    placed.append(Placed(start_s, self._problem.run(member, choice), used))
        return in_order(placed, self._problem.heads)
