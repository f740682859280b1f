"""`milp`: CEREBRO's mixed integer linear programme, solved by SciPy's HiGHS within a time limit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.hopper.list_schedule import randomized
from hetctl.methods.hopper.schedule import Schedule, SearchOptions, UnitTimes, in_sequence

MOST_PAIRS = 5000
"""Most pairs of mutually exclusive units; with more, HiGHS finds nothing in minutes and exceeds its time."""

UnitIndex = tuple[int, int]
Term = tuple[int, float]


def milp(units: UnitTimes, options: SearchOptions) -> Schedule:
    """Return the best schedule that the solver finds within its time (CEREBRO, Equations 1 and 2).

    With replicas the programme is that of appendix 10. Its very large value V is the makespan of
    `randomized`. That schedule is returned if the solver finds none, or if the programme would have more
    than `MOST_PAIRS` pairs.
    """
    until_s = options.clock() + options.seconds
    # The paper's V is the sum of all unit times; a makespan is smaller, which makes the relaxation tighter.
    first = randomized(units, options)
    if _pairs(units) > MOST_PAIRS:
        return first
    programme = _Programme(units, first.makespan_s)
    found = programme.solve(until_s - options.clock())
    return first if found is None else min(first, found, key=attrgetter("makespan_s"))


def _pairs(units: UnitTimes) -> int:
    configs, partitions, _ = units.seconds.shape
    at = np.isfinite(units.seconds).sum(axis=(0, 1))
    return int(configs * partitions * (partitions - 1) // 2 + (at * (at - 1) // 2).sum())


class _Programme:
    """Columns and rows of the programme; each row is a sum of terms with a lower limit.

    The columns are the makespan C, the starts X, the places Q of units (appendix 10; products of two are
    linearised), and the orders Y of units of a configuration and Z of units at a worker.
    """

    def __init__(self, units: UnitTimes, very_large_s: float) -> None:
        self._units = units
        self._v = very_large_s
        self._least: list[float] = []
        self._terms: list[tuple[int, int, float]] = []
        self._wholes: list[int] = []
        self._makespan = self._column(whole=False)
        self._starts: dict[UnitIndex, int] = {}
        self._places: dict[UnitIndex, dict[int, int]] = {}
        configs, partitions = range(len(units.configs)), range(len(units.partitions))
        for unit in product(configs, partitions):
            self._add_unit(unit)
        for i, (j, k) in product(configs, combinations(partitions, 2)):
            self._add_isolation((i, j), (i, k))
        for (i, k), j, m in product(combinations(configs, 2), partitions, partitions):
            self._add_exclusive_access((i, j), (k, m))

    def _column(self, whole: bool) -> int:
        self._wholes.append(int(whole))
        return len(self._wholes) - 1

    def _row(self, least: float, *terms: Term) -> None:
        self._terms += [(len(self._least), column, factor) for column, factor in terms]
        self._least.append(least)

    def _time(self, unit: UnitIndex, worker: int) -> float:
        return float(self._units.seconds[unit][worker])

    def _minus_time(self, unit: UnitIndex) -> Iterator[Term]:
        for worker, place in self._places[unit].items():
            yield place, -self._time(unit, worker)

    def _add_unit(self, unit: UnitIndex) -> None:
        """Assign a unit to one worker (appendix 10, constraints 1 and 2); it ends before C (Equation 2.f)."""
        workers = np.flatnonzero(np.isfinite(self._units.seconds[unit])).tolist()
        self._starts[unit] = self._column(whole=False)
        self._places[unit] = {worker: self._column(whole=True) for worker in workers}
        self._row(1, *((place, 1) for place in self._places[unit].values()))
        self._row(-1, *((place, -1) for place in self._places[unit].values()))
        self._row(0, (self._makespan, 1), (self._starts[unit], -1), *self._minus_time(unit))

    def _add_isolation(self, one: UnitIndex, other: UnitIndex) -> None:
        """Let one of two units of a configuration follow the other (Equations 2.a and 2.b)."""
        x, y, v = self._starts[one], self._starts[other], self._v
        order = self._column(whole=True)
        self._row(0, (x, 1), (y, -1), (order, v), *self._minus_time(other))
        self._row(-v, (y, 1), (x, -1), (order, -v), *self._minus_time(one))

    def _add_exclusive_access(self, one: UnitIndex, other: UnitIndex) -> None:
        """Let one of two units follow the other if they share a worker (Equations 2.c and 2.d)."""
        shared = self._places[one].keys() & self._places[other].keys()
        if not shared:
            return
        x, y, v = self._starts[one], self._starts[other], self._v
        order = self._column(whole=True)
        for worker in shared:
            p, q = self._places[one][worker], self._places[other][worker]
            one_s, other_s = self._time(one, worker), self._time(other, worker)
            self._row(-2 * v, (x, 1), (y, -1), (order, v), (p, -v), (q, -v - other_s))
            self._row(-3 * v, (y, 1), (x, -1), (order, -v), (p, -v - one_s), (q, -v))

    def solve(self, seconds: float) -> Schedule | None:
        """Return the solver's schedule with recomputed times, free of its tolerances; None if none."""
        # SciPy's HiGHS, since the package highspy and OR-Tools cannot be loaded in one process.
        from scipy import optimize
        from scipy.sparse import coo_array

        if seconds <= 0:
            return None
        wholes = np.array(self._wholes)
        rows, columns, factors = zip(*self._terms, strict=True)
        matrix = coo_array((factors, (rows, columns)), shape=(len(self._least), len(wholes)))
        solution = optimize.milp(
            c=np.arange(len(wholes)) == self._makespan,
            integrality=wholes,
            bounds=optimize.Bounds(0, np.where(wholes, 1, self._v)),
            constraints=optimize.LinearConstraint(matrix.tocsr(), lb=self._least),
            options={"time_limit": seconds},
        )
        return None if solution.x is None else self._schedule(solution.x)

    def _schedule(self, values: NDArray[np.float64]) -> Schedule:
        places = [
            (values[self._starts[unit]], self._time(unit, worker), (*unit, worker))
            for unit, at in self._places.items()
            for worker, place in at.items()
            # The solver's whole numbers are whole within a tolerance only.
            if values[place] > 0.5
        ]
        return in_sequence(self._units, [place for *_, place in sorted(places)])
