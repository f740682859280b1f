"""Schedules: hops of one epoch, and the visits that carry them out, with their traces.

A trace has one JSON object a line. Simulations and runs write one, and a replay repeats it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hetctl.methods.hopper.unit_times import UnitTimes
from hetctl.model.hops import Visit
from hetctl.model.values import dataclass

PRECISION = 1e-9
"""Tolerance relative to the makespan: times are sums of floating-point numbers."""

Place = tuple[int, int, int]
"""Numbers of the configuration, the partition and the worker."""


class Hop(NamedTuple):
    """Training of a configuration on a partition at a worker, all by number, from start to end."""

    config: int
    partition: int
    worker: int
    start_s: float
    end_s: float


def by_start(hop: Hop) -> tuple[float, float]:
    """Return a sort key by start, then end, so that at equal starts hops without duration come first."""
    return hop.start_s, hop.end_s


@dataclass(frozen=True)
class SearchOptions:
    """Options of every scheduler; each uses those that it supports.

    Parameters
    ----------
    seconds : float
        Time limit of a search; a scheduler without a search ignores it.
    clock : callable
        Clock that returns seconds.
    """

    seed: int = 0
    seconds: float = 2.0
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Schedule:
    """Hops of one epoch, in any order."""

    hops: tuple[Hop, ...]

    @property
    def makespan_s(self) -> float:
        """End of the last hop in seconds."""
        return max((hop.end_s for hop in self.hops), default=0.0)

    @property
    def sequence(self) -> list[Place]:
        """Places in order of their starts; at equal starts, hops without duration come first."""
        hops = sorted(self.hops, key=by_start)
        return [(hop.config, hop.partition, hop.worker) for hop in hops]


def in_sequence(units: UnitTimes, sequence: Iterable[Place]) -> Schedule:
    """Return the hops of a sequence, each as early as its configuration and its worker are free."""
    configs, workers = [0.0] * len(units.configs), [0.0] * len(units.workers)
    hops = []
    for config, partition, worker in sequence:
        start_s = max(configs[config], workers[worker])
        end_s = start_s + float(units.seconds[config, partition, worker])
        configs[config] = workers[worker] = end_s
        hops.append(Hop(config, partition, worker, start_s, end_s))
    return Schedule(tuple(hops))


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


def trace_line(visit: Visit, start_s: float, end_s: float, *, lost: bool) -> str:
    """Return the line of a visit, with its end.

    Parameters
    ----------
    start_s, end_s : float
        Seconds from the start of the trace.
    lost : bool
        True if its result was lost.
    """
    fields = {
        "config": visit.config,
        "worker": visit.worker,
        "start": start_s,
        "end": end_s,
        "partition": visit.partition,
        "epoch": visit.epoch,
        "lost": lost,
    }
    return json.dumps(fields) + "\n"


def visits_to_repeat(text: str) -> tuple[Visit, ...]:
    """Return the visits of a trace that were not lost, in the order of their starts: a plan for `Hopper`.

    Parameters
    ----------
    text : str
        Trace that was checked when it was given.
    """
    lines = [json.loads(line) for line in text.split("\n") if line.strip()]
    done = sorted((line for line in lines if not line["lost"]), key=lambda line: (line["start"], line["end"]))
    return tuple(
        Visit(number, line["config"], line["epoch"], line["partition"], line["worker"])
        for number, line in enumerate(done)
    )
