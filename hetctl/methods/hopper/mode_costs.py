"""What the hopper, data parallelism and the hybrid of both come to on the same unit times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hetctl.methods.hopper.parallelism_rule import Efficiency, Groups, grouped, groups
from hetctl.methods.hopper.schedule import Schedule
from hetctl.methods.hopper.unit_times import UnitTimes
from hetctl.model.plan import HOPPER


@dataclass(frozen=True)
class ModeCost:
    """A way to train, as the hopper sees it: its groups are the workers.

    Parameters
    ----------
    groups : Groups
        The workers of each group, by their numbers.
    units : UnitTimes
        Of the groups.
    schedule : Schedule
        Of one epoch of these units.
    """

    way: str
    groups: Groups
    units: UnitTimes
    schedule: Schedule


def price(
    units: UnitTimes,
    ways: Iterable[str],
    efficiency: Efficiency,
    schedule: Callable[[UnitTimes], Schedule],
) -> list[ModeCost]:
    """Return the ways from the quickest to the slowest; of equal ones the first one given comes first.

    Parameters
    ----------
    efficiency : callable
        Of a group that trains data-parallel, by its size.
    schedule : callable
        A scheduler of the hopper, with its options.

    Raises
    ------
    BadInputError
        If partitions are on several workers or a worker has several, and a way groups workers.
    """
    priced = []
    for way in ways:
        parts = groups(way, units)
        times = units if way == HOPPER else grouped(units, parts, efficiency)
        priced.append(ModeCost(way, parts, times, schedule(times)))
    return sorted(priced, key=lambda one: one.schedule.makespan_s)
