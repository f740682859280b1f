"""Comparison of the hopper, data parallelism and their hybrid on the same unit times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hetctl.methods.hopper.parallelism_rule import Efficiency, Groups, grouped, groups
from hetctl.methods.hopper.schedule import Schedule
from hetctl.methods.hopper.unit_times import UnitTimes
from hetctl.model.plan import HOPPER


@dataclass(frozen=True)
class ModeCost:
    """Schedule of one training mode; its groups of workers act as the hopper's workers.

    Parameters
    ----------
    groups : Groups
        Numbers of the workers in each group.
    units : UnitTimes
        Unit times of the groups.
    schedule : Schedule
        Schedule of one epoch.
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
    """Return the modes from the fastest to the slowest; equally fast ones stay in the given order.

    Parameters
    ----------
    efficiency : callable
        Efficiency of a group that trains data-parallel, by its size.
    schedule : callable
        Scheduler of the hopper, with its options.

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
