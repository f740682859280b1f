"""Plan of several epochs of training visits, each followed by the visits that evaluate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from hetctl.methods.hopper import SCHEDULERS
from hetctl.methods.hopper.list_schedule import Indices, dispatch
from hetctl.methods.hopper.schedule import Schedule, SearchOptions, Visit, visits_of
from hetctl.methods.hopper.unit_times import UnitTimes

SHRUNK = 0.75
"""Largest share of the configurations of a schedule that may remain before a new schedule is made."""


def planned_visits(
    train: UnitTimes,
    evaluate: UnitTimes,
    epochs: Mapping[str, int],
    search: SearchOptions,
    scheduler: str = "best",
) -> tuple[Visit, ...]:
    """Return the visits of all epochs in an order in which they can start: a plan for `Hopper`.

    Training epoch e, counted from 0, is epoch 2 e of the hopper, and its evaluation epoch 2 e + 1. A new
    schedule is made whenever many configurations have left.

    Parameters
    ----------
    train, evaluate : UnitTimes
        Times of the visits, of the same configurations, partitions and workers.
    epochs : mapping of str to int
        Number of training epochs of each configuration.
    search : SearchOptions
        Options of the scheduler; its seconds are shared by all schedules.
    scheduler : str
        Name of the scheduler of the training visits.

    Raises
    ------
    BadInputError
        If the scheduler does not support partitions with several workers, or workers with several.
    """
    sets = _sets(epochs)
    each = replace(search, seconds=search.seconds / max(len(set(sets)), 1))
    schedules = {
        configs: _epoch(train.of_configs(configs), evaluate.of_configs(configs), each, scheduler)
        for configs in dict.fromkeys(sets)
    }
    visits = (
        replace(visit, epoch=2 * epoch + visit.epoch)
        for epoch, configs in enumerate(sets)
        for visit in schedules[configs]
    )
    left = (visit for visit in visits if visit.epoch < 2 * epochs[visit.config])
    return tuple(replace(visit, number=number) for number, visit in enumerate(left))


def _epoch(train: UnitTimes, evaluate: UnitTimes, search: SearchOptions, scheduler: str) -> tuple[Visit, ...]:
    """Return the training visits of one epoch with number 0, and its evaluation visits with number 1."""
    schedule = SCHEDULERS[scheduler](train, search)
    evaluation = visits_of(_evaluation(schedule, evaluate), evaluate)
    return (*visits_of(schedule, train), *(replace(visit, epoch=1) for visit in evaluation))


def _evaluation(trained: Schedule, evaluate: UnitTimes) -> Schedule:
    """Return a dense schedule of the evaluation, in which the configurations that end first go first."""
    ends_s: defaultdict[int, float] = defaultdict(float)
    for hop in trained.hops:
        ends_s[hop.config] = max(ends_s[hop.config], hop.end_s)
    rank = {config: place for place, config in enumerate(sorted(ends_s, key=lambda c: (ends_s[c], c)))}
    partitions = len(evaluate.partitions)

    def first_ended(_worker: int, ready: Indices) -> int:
        return int(min(ready, key=lambda unit: rank[unit // partitions]))

    return dispatch(evaluate, first_ended)


def _sets(epochs: Mapping[str, int]) -> list[frozenset[str]]:
    """Return for each epoch the configurations that its schedule covers, a superset of those left."""
    sets: list[frozenset[str]] = []
    for epoch in range(max(epochs.values(), default=0)):
        left = frozenset(config for config, count in epochs.items() if count > epoch)
        sets.append(left if not sets or len(left) <= SHRUNK * len(sets[-1]) else sets[-1])
    return sets
