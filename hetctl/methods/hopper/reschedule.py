"""Rescheduling: a new plan of what is left when a worker fails, returns or joins late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count, takewhile
from operator import attrgetter

import numpy as np

from hetctl.methods.hopper.list_schedule import NOISES, Residual, dense
from hetctl.methods.hopper.schedule import Hop, Schedule, SearchOptions
from hetctl.methods.hopper.state_machine import Hopper
from hetctl.methods.hopper.unit_times import UnitTimes
from hetctl.model.hops import Visit
from hetctl.model.values import dataclass

MOST_SECONDS = 0.2
"""Time limit of a search in seconds, short since workers are idle meanwhile."""
MOST_UNITS = 5_000
"""Most units of a plan, unless one epoch has more; a dense schedule of them takes about `MOST_SECONDS`."""


@dataclass(frozen=True)
class Rescheduler:
    """Function that makes a new plan for a hopper from its state.

    Parameters
    ----------
    units : UnitTimes
        Unit times of all configurations and workers that may join.
    epochs : mapping of str to int
        Total epochs of each configuration.
    passes : int
        Epochs of the hopper in each of `epochs`: 2 if every second one evaluates, which is not planned.
    options : SearchOptions
        Search options; at most `MOST_SECONDS` of their seconds are used.
    """

    units: UnitTimes
    epochs: Mapping[str, int]
    options: SearchOptions
    passes: int = 1

    def __call__(self, hopper: Hopper, now_s: float) -> tuple[Visit, ...]:
        """Return visits that are valid however long absent workers stay absent.

        Units that only absent workers could process are left out, and so are units that depend on them and
        those beyond the horizon of `MOST_UNITS`.
        """
        residual = self.residual(hopper, now_s)
        units = self.units
        hops = _certain(_shortest(residual, self.options), residual)
        return tuple(
            Visit(
                number=number,
                config=units.configs[hop.config],
                epoch=(hopper.configs[units.configs[hop.config]] // self.passes + later) * self.passes,
                partition=units.partitions[hop.partition],
                worker=units.workers[hop.worker],
            )
            for number, (hop, later) in enumerate(hops)
        )

    def residual(self, hopper: Hopper, now_s: float) -> Residual:
        """Return what is left of a run at a time on the clock of `Hopper.since`."""
        units, passes = self.units, self.passes
        configs, partitions, workers = (
            {name: i for i, name in enumerate(names)}
            for names in (units.configs, units.partitions, units.workers)
        )
        waiting = np.zeros((len(configs), len(partitions)), dtype=bool)
        to_come = np.zeros(len(configs), dtype=np.intp)
        for config, epoch in hopper.configs.items():
            waiting[configs[config]] = True
            to_come[configs[config]] = self.epochs[config] - epoch // passes - 1
        running = []
        for visit in (*hopper.log, *hopper.running.values()):
            # A configuration that is being evaluated has done all training visits of its epoch.
            epoch, evaluation = divmod(visit.epoch, passes)
            if not evaluation and epoch == hopper.configs.get(visit.config, -1) // passes:
                waiting[configs[visit.config], partitions[visit.partition]] = False
        for worker, visit in hopper.running.items():
            if visit.epoch % passes == 0:
                row, place = configs[visit.config], workers[worker]
                length_s = float(units.seconds[row, partitions[visit.partition], place])
                running.append((max(0.0, hopper.since[worker] + length_s - now_s), place, row))
        horizon = max(0, MOST_UNITS - int(waiting.sum())) // waiting.size
        absent = frozenset(number for name, number in workers.items() if name not in hopper.workers)
        return Residual(units, waiting, to_come.clip(0, horizon), tuple(running), absent)


def _shortest(residual: Residual, options: SearchOptions) -> Schedule:
    """Return the shortest of the dense schedules that can be made within the time, at least one."""
    until_s = options.clock() + min(options.seconds, MOST_SECONDS)
    found = dense(residual)
    numbers = takewhile(lambda _: options.clock() < until_s, count())
    draws = (dense(residual, NOISES[i % len(NOISES)], options.seed + i) for i in numbers)
    return min((found, *draws), key=attrgetter("makespan_s"))


def _certain(schedule: Schedule, residual: Residual) -> Iterator[tuple[Hop, int]]:
    """Yield hops, each with its number of epochs after the present epoch of its configuration."""
    until_s = min((hop.start_s for hop in schedule.hops if hop.worker in residual.absent), default=np.inf)
    earlier: Counter[tuple[int, int]] = Counter()
    for hop in schedule.hops:
        if hop.start_s >= until_s:
            return
        unit = hop.config, hop.partition
        yield hop, earlier[unit] + (not residual.waiting[unit])
        earlier[unit] += 1
