"""`best`: dense schedules until they no longer improve, then a solver for small problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from operator import attrgetter

import numpy as np

from hetctl.methods.hopper.approximate import approximate
from hetctl.methods.hopper.list_schedule import NOISES, dense
from hetctl.methods.hopper.schedule import PRECISION, Schedule, SearchOptions
from hetctl.methods.hopper.solver import refine
from hetctl.methods.hopper.unit_times import UnitTimes, lower_bound, shares

MOST_PLACES = 600
"""Most pairs of a unit and a worker for it; with more the solver finds nothing in seconds."""
MOST_BOUNDED = 20_000
"""Most places with replicas for which the lower bound is computed; with more it takes too long."""
DRAWS, DRAWS_SHARE = 100, 0.5
"""Most dense schedules before the solver, and their largest share of the time."""


def best(units: UnitTimes, options: SearchOptions) -> Schedule:
    """Return the best schedule found in the time; one that reaches the lower bound ends the search.

    The first candidates are dense schedules and, for an open shop, that of `approximate`. With replicas,
    every other candidate assigns each unit to a single worker.
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
    yield dense(units)
    if units.is_open_shop:
        yield approximate(units, options)
    for number in count():
        seed = options.seed + number
        shop = units if units.is_open_shop or number % 2 else on_single_workers(units, seed)
        yield dense(shop, NOISES[number % len(NOISES)], seed)


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
