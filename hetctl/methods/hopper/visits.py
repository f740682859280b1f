"""Visits of configurations to partitions, the elements of plans and logs."""

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
    """Training of a unit at a worker.

    Parameters
    ----------
    number : int
        Number of the start, which distinguishes repeated attempts at a unit.
    """

    number: int
    config: str
    epoch: int
    partition: str
    worker: str

    @property
    def unit(self) -> Unit:
        """Unit that is trained."""
        return Unit(self.config, self.epoch, self.partition)


def by_start(hop: Hop) -> tuple[float, float]:
    """Return a sort key by start, then end, so that at equal starts hops without duration come first."""
    return hop.start_s, hop.end_s


def visits_of(schedule: Schedule, units: UnitTimes, epochs: int = 1) -> tuple[Visit, ...]:
    """Return the visits of a schedule in order of their starts, repeated for each epoch."""
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
