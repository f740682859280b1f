"""Visits of configurations to partitions: what a plan asks for, and what a log remembers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hetctl.methods.hopper.schedule import Hop, Schedule
from hetctl.methods.hopper.unit_times import UnitTimes


class Unit(NamedTuple):
    """A training unit: one configuration on one partition in one of its epochs."""

    config: str
    epoch: int
    partition: str


@dataclass(frozen=True, slots=True)
class Visit:
    """A unit at a worker.

    Parameters
    ----------
    number : int
        Counts the starts, so that a second attempt is another visit.
    """

    number: int
    config: str
    epoch: int
    partition: str
    worker: str

    @property
    def unit(self) -> Unit:
        """What is trained."""
        return Unit(self.config, self.epoch, self.partition)


def by_start(hop: Hop) -> tuple[float, float]:
    """Return a key: hops sorted by it could start in that order, those that take no time as well."""
    return hop.start_s, hop.end_s


def visits_of(schedule: Schedule, units: UnitTimes, epochs: int = 1) -> tuple[Visit, ...]:
    """Return the visits of a schedule in the order of their starts, once for each epoch."""
    hops = sorted(schedule.hops, key=by_start)
    return tuple(
        Visit(
            number=epoch * len(hops) + i,
            config=units.configs[hop.config],
            epoch=epoch,
            partition=units.partitions[hop.partition],
            worker=units.workers[hop.worker],
        )
        for epoch in range(epochs)
        for i, hop in enumerate(hops)
    )
