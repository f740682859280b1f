"""`best`: dense schedules until they no longer improve, then for small problems OR-Tools' CP-SAT."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from hetctl.methods.hopper.approximate import approximate
from hetctl.methods.hopper.list_schedule import NOISES, Residual, dense
from hetctl.methods.hopper.schedule import (
    PRECISION,
    Place,
    Schedule,
    SearchOptions,
    UnitTimes,
    in_sequence,
    lower_bound,
    shares,
)

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

MOST_PLACES = 600
"""Most pairs of a unit and a worker for it; with more the solver finds nothing in seconds."""
MOST_BOUNDED = 20_000
"""Most places with replicas for which the lower bound is computed; with more it takes too long."""
DRAWS, DRAWS_SHARE = 100, 0.5
"""Most dense schedules before the solver, and their largest share of the time."""
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


def best(units: UnitTimes, options: SearchOptions) -> Schedule:
    """Return the best schedule found in the time; one that reaches the lower bound ends the search.

    The first candidates are dense schedules and, for an open shop, that of `approximate`. With replicas,
    every second candidate assigns each unit to a single worker.
    """
    began_s = options.clock()
    places = np.isfinite(units.seconds).sum()
    bound_s = lower_bound(units) if units.is_open_shop or places <= MOST_BOUNDED else 0.0
    enough_s = bound_s * (1 + PRECISION)
    is_small = places <= MOST_PLACES
    draws, share = (DRAWS, DRAWS_SHARE) if is_small else (None, 1.0)
    until_s = began_s + share * options.seconds
    schedules = islice(_schedules(units, options), draws)
    found = next(schedules)
    while found.makespan_s > enough_s and options.clock() < until_s and (draw := next(schedules, None)):
        found = min(found, draw, key=attrgetter("makespan_s"))
    left_s = began_s + options.seconds - options.clock()
    if not is_small or left_s <= 0 or found.makespan_s <= enough_s:
        return found
    return refine(units, found, bound_s, replace(options, seconds=left_s))


def _schedules(units: UnitTimes, options: SearchOptions) -> Iterator[Schedule]:
    yield dense(Residual.whole(units))
    if units.is_open_shop:
        yield approximate(units, options)
    for number in count():
        seed = options.seed + number
        shop = units if units.is_open_shop or number % 2 else on_single_workers(units, seed)
        yield dense(Residual.whole(shop), NOISES[number % len(NOISES)], seed)


def on_single_workers(units: UnitTimes, seed: int) -> UnitTimes:
    """Return the units with one worker each, such that all workers are about equally busy.

    A partition is shared as if all configurations were one; the configurations of a worker are then drawn.
    If some partition has no worker that can train them all, the units are returned unchanged.
    """
    together = units.seconds.sum(axis=0)
    if np.isinf(together).all(axis=1).any():
        return units
    _, (parts,) = shares(together[None], one_at_a_time=False)
    draw = np.random.default_rng(seed)
    seconds = np.full_like(units.seconds, np.inf)
    for partition, part in enumerate(parts):
        configs = draw.permutation(len(units.configs))
        times = units.fastest[configs, partition]
        done = (np.cumsum(times) - times / 2) / max(times.sum(), np.finfo(float).tiny)
        last = part.nonzero()[0].max()
        workers = np.searchsorted(np.cumsum(part), done, side="right").clip(max=last)
        seconds[configs, partition, workers] = units.seconds[configs, partition, workers]
    return replace(units, seconds=seconds)


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
