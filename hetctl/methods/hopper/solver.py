"""Improvement of a schedule by constraint programming (OR-Tools' CP-SAT)."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from hetctl.methods.hopper.schedule import Place, Schedule, SearchOptions, in_sequence
from hetctl.methods.hopper.unit_times import UnitTimes, lower_bound

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

TICKS = 100_000
"""Ticks per best makespan so far; times are rounded up to ticks. If all are whole seconds, a tick is 1 s."""
PARAMETERS = {
    "linearization_level": 0,
    "symmetry_level": 0,
    "cp_model_probing_level": 0,
    "use_strong_propagation_in_disjunctive": True,
    "use_precedences_in_disjunctive_constraint": True,
    "use_dynamic_precedence_in_disjunctive": True,
}
"""Little presolve and strong propagation. For open shops the search is best with a single thread."""


def refine(units: UnitTimes, schedule: Schedule, bound_s: float, options: SearchOptions) -> Schedule:
    """Return a schedule that is no worse than the given one, within about `SearchOptions.seconds`.

    Parameters
    ----------
    bound_s : float
        Lower bound of the makespan; the search stops when it reaches it.
    """
    # The import of OR-Tools counts as well.
    until_s = options.clock() + options.seconds
    from ortools.sat.python import cp_model

    model = _UnitModel(units, schedule, bound_s)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(until_s - options.clock(), 0.0)
    # The parameter is a signed number of 32 bits.
    solver.parameters.random_seed = options.seed % (1 << 31)
    solver.parameters.num_workers = 1 if units.is_open_shop else 2
    for name, value in PARAMETERS.items():
        setattr(solver.parameters, name, value)
    if solver.status_name(solver.solve(model.model)) not in ("OPTIMAL", "FEASIBLE"):
        return schedule
    return min(schedule, in_sequence(units, model.sequence(solver)), key=attrgetter("makespan_s"))


class _UnitModel:
    """Constraint model: an interval for each unit, with replicas an optional one for each worker."""

    def __init__(self, units: UnitTimes, hint: Schedule, bound_s: float) -> None:
        from ortools.sat.python import cp_model

        self.model = cp_model.CpModel()
        tick_s = _tick_s(units, hint.makespan_s)
        # The tolerance keeps a whole number of ticks from being rounded up by a floating-point error.
        self._ticks = replace(units, seconds=np.ceil(units.seconds / tick_s - 1e-6))
        hinted = in_sequence(self._ticks, hint.sequence)
        self._horizon = int(hinted.makespan_s)
        least = lower_bound(self._ticks) if units.is_open_shop else math.floor(bound_s / tick_s)
        self._makespan = self.model.new_int_var(int(least), self._horizon, "makespan")
        self._places: dict[Place, tuple[cp_model.IntVar, cp_model.IntVar | bool]] = {}
        self._intervals: dict[tuple[str, int], list[cp_model.IntervalVar]] = defaultdict(list)
        for config, partition in np.ndindex(*units.seconds.shape[:2]):
            self._add_unit(config, partition)
        for intervals in self._intervals.values():
            self.model.add_no_overlap(intervals)
        self.model.minimize(self._makespan)
        self._add_hint(hinted)

    def _add_unit(self, config: int, partition: int) -> None:
        seconds = self._ticks.seconds[config, partition]
        workers = np.flatnonzero(np.isfinite(seconds)).tolist()
        start = self.model.new_int_var(0, self._horizon, "start")
        chosen: list[cp_model.IntVar | bool] = [True]
        if len(workers) > 1:
            chosen = [self.model.new_bool_var("place") for _ in workers]
            self.model.add_exactly_one(chosen)
        for worker, place in zip(workers, chosen, strict=True):
            ticks = int(seconds[worker])
            interval = self.model.new_optional_fixed_size_interval_var(start, ticks, place, "hop")
            self._places[config, partition, worker] = start, place
            self._intervals["config", config].append(interval)
            self._intervals["worker", worker].append(interval)
            self.model.add(start + ticks <= self._makespan).only_enforce_if(place)

    def _add_hint(self, hint: Schedule) -> None:
        """Add a hint in whole ticks: with individually rounded times, the hops of the hint would overlap."""
        starts = {(hop.config, hop.partition, hop.worker): int(hop.start_s) for hop in hint.hops}
        self.model.add_hint(self._makespan, self._horizon)
        for where, (start, place) in self._places.items():
            if where in starts:
                self.model.add_hint(start, starts[where])
            if not isinstance(place, bool):
                self.model.add_hint(place, where in starts)

    def sequence(self, solver: cp_model.CpSolver) -> list[Place]:
        """Return the places of the hops in the solution, in order of their starts."""
        found = [
            (solver.value(start), self._ticks.seconds[where], where)
            for where, (start, place) in self._places.items()
            if place is True or solver.value(place)
        ]
        return [where for *_, where in sorted(found)]


def _tick_s(units: UnitTimes, makespan_s: float) -> float:
    seconds = units.seconds[np.isfinite(units.seconds)]
    # In ticks of 1 s whole times are exact, and an optimum can be proved.
    return 1.0 if (seconds == np.rint(seconds)).all() else makespan_s / TICKS
