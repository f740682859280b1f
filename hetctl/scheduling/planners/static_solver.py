"""Schedules by constraint programming (OR-Tools' CP-SAT), starting from a good one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hetctl.scheduling.planners.static_schedule import (
    Placed,
    PlacedRuns,
    Problem,
    Run,
    follow,
    in_order,
    is_even,
)

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

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
