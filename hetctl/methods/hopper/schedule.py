"""A schedule of hops, and the invariants that it has to keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from hetctl.methods.hopper.unit_times import UnitTimes

PRECISION = 1e-9
"""Of the makespan: times are sums of floating-point numbers."""

Place = tuple[int, int, int]
"""(config, partition, worker), by their numbers."""


class Hop(NamedTuple):
    """A configuration on a partition at a worker, all by their numbers, from start to end."""

    config: int
    partition: int
    worker: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Schedule:
    """The hops of one epoch, in any order."""

    hops: tuple[Hop, ...]

    @property
    def makespan_s(self) -> float:
        """When the last hop ends."""
        return max((hop.end_s for hop in self.hops), default=0.0)

    @property
    def sequence(self) -> list[Place]:
        """Places by start; what takes no time comes before what starts with it."""
        hops = sorted(self.hops, key=attrgetter("start_s", "end_s"))
        return [(hop.config, hop.partition, hop.worker) for hop in hops]


def in_sequence(units: UnitTimes, sequence: Iterable[Place]) -> Schedule:
    """Return the hops of a sequence, each as early as its configuration and its worker allow."""
    configs, workers = [0.0] * len(units.configs), [0.0] * len(units.workers)
    hops = []
    for config, partition, worker in sequence:
        start_s = max(configs[config], workers[worker])
        end_s = start_s + float(units.seconds[config, partition, worker])
        configs[config] = workers[worker] = end_s
        hops.append(Hop(config, partition, worker, start_s, end_s))
    return Schedule(tuple(hops))


def violations(schedule: Schedule, units: UnitTimes) -> list[str]:
    """Say in words which of the invariants of CEREBRO, section 2, a schedule breaks; nothing if none."""
    slack_s = PRECISION * schedule.makespan_s
    return [
        *_incomplete(schedule, units),
        *_overlaps("isolation", schedule, attrgetter("config"), units.configs, slack_s),
        *_overlaps("exclusive access", schedule, attrgetter("worker"), units.workers, slack_s),
        *_preempted(schedule, units, slack_s),
    ]


def _incomplete(schedule: Schedule, units: UnitTimes) -> list[str]:
    """Each configuration is trained on each partition exactly once."""
    times = Counter((hop.config, hop.partition) for hop in schedule.hops)
    return [
        f"completeness: {config} visits {partition} {times[i, j]} times"
        for i, config in enumerate(units.configs)
        for j, partition in enumerate(units.partitions)
        if times[i, j] != 1
    ]


def _overlaps(
    rule: str, schedule: Schedule, of: Callable[[Hop], int], names: tuple[str, ...], slack_s: float
) -> list[str]:
    """Neither a configuration nor a worker is at two hops at once."""
    hops = sorted(schedule.hops, key=lambda hop: (of(hop), hop.start_s, hop.end_s))
    return [
        f"{rule}: {names[of(hop)]} starts at {later.start_s:g} s, before it has ended at {hop.end_s:g} s"
        for hop, later in pairwise(hops)
        if of(hop) == of(later) and later.start_s < hop.end_s - slack_s
    ]


def _preempted(schedule: Schedule, units: UnitTimes, slack_s: float) -> list[str]:
    """Each hop takes the time of its unit, without interruption, where its partition is."""
    return [
        f"no preemption: {units.configs[config]} takes {units.seconds[config, partition, worker]:g} s on"
        f" {units.workers[worker]}, not from {start_s:g} to {end_s:g} s"
        for config, partition, worker, start_s, end_s in schedule.hops
        if start_s < 0 or not abs(end_s - start_s - units.seconds[config, partition, worker]) <= slack_s
    ]
