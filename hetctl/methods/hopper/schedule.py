"""Unit times, schedules of the hops of one epoch, and the visits that carry them out, with their traces.

A trace has one JSON object a line. Simulations and runs write one, and a replay repeats it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetctl.model.errors import BadInputError, InfeasibleError
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


@dataclass(frozen=True, eq=False)
class UnitTimes:
    """Unit times of one epoch, in which every configuration visits every partition once.

    Parameters
    ----------
    configs : tuple of str
        Training configurations, S in CEREBRO.
    partitions : tuple of str
        Partitions of the training data.
    workers : tuple of str
        Workers, each of which trains one configuration at a time.
    seconds : array of shape (configs, partitions, workers)
        Time of one sub-epoch with the hop that follows, T in CEREBRO (section 4.1; appendix 10 with
        replicas); infinite if the worker does not have the partition. The array is copied.

    Raises
    ------
    BadInputError
        If the shape does not match the names, or a time is negative or NaN.
    InfeasibleError
        If no worker can train some configuration on some partition.
    """

    configs: tuple[str, ...]
    partitions: tuple[str, ...]
    workers: tuple[str, ...]
    seconds: NDArray[np.float64]

    def __post_init__(self) -> None:
        seconds = np.array(self.seconds, dtype=np.float64)
        shape = (len(self.configs), len(self.partitions), len(self.workers))
        if seconds.shape != shape:
            raise BadInputError(f"unit times have the shape {seconds.shape}, but their names require {shape}")
        if 0 in shape:
            raise BadInputError("unit times need a configuration, a partition and a worker at least")
        if np.isnan(seconds).any() or (seconds < 0).any():
            raise BadInputError("a unit time is negative or not a number")
        nowhere = np.argwhere(np.isinf(seconds).all(axis=2))
        if len(nowhere):
            config, partition = nowhere[0]
            raise InfeasibleError(
                f"no worker can train {self.configs[config]} on partition {self.partitions[partition]}"
            )
        # Cached properties depend on the array, so it must not change.
        seconds.flags.writeable = False
        object.__setattr__(self, "seconds", seconds)

    @classmethod
    def from_matrix(
        cls, matrix: ArrayLike, configs: Sequence[str] | None = None, workers: Sequence[str] | None = None
    ) -> UnitTimes:
        """Return the times of partitions that are on one worker each.

        Parameters
        ----------
        matrix : array of shape (configs, workers)
            Seconds of each configuration on the partition of each worker.
        """
        rows = np.asarray(matrix, dtype=np.float64)
        if rows.ndim != 2:
            raise BadInputError(f"a matrix of unit times has two dimensions, not {rows.ndim}")
        count, places = rows.shape
        seconds = np.full((count, places, places), np.inf)
        seconds[:, range(places), range(places)] = rows
        return cls(
            configs=tuple(configs or (f"c{i}" for i in range(count))),
            partitions=tuple(f"p{j}" for j in range(places)),
            workers=tuple(workers or (f"w{j}" for j in range(places))),
            seconds=seconds,
        )

    def of_configs(self, configs: Collection[str]) -> UnitTimes:
        """Return the times of some of the configurations."""
        kept = [i for i, config in enumerate(self.configs) if config in configs]
        return replace(
            self, configs=tuple(self.configs[i] for i in kept), seconds=self.seconds[np.array(kept, int)]
        )

    @cached_property
    def homes(self) -> NDArray[np.intp]:
        """Worker that has each partition, the first one of several; shape (partitions,)."""
        return np.asarray(self._has.argmax(axis=1))

    @cached_property
    def is_open_shop(self) -> bool:
        """True if each partition is on one worker and each worker has one partition."""
        has = self._has
        return bool((has.sum(axis=0) == 1).all() and (has.sum(axis=1) == 1).all())

    @cached_property
    def matrix(self) -> NDArray[np.float64]:
        """Unit times in seconds of an open shop, shape (configs, partitions)."""
        if not self.is_open_shop:
            raise BadInputError("a partition is on several workers, or a worker has no partition or several")
        return self.seconds[:, range(len(self.partitions)), self.homes]

    @cached_property
    def fastest(self) -> NDArray[np.float64]:
        """Unit times in seconds on the fastest worker for each unit, shape (configs, partitions)."""
        return np.asarray(self.seconds.min(axis=2))

    @cached_property
    def _has(self) -> NDArray[np.bool_]:
        """True where a worker has a partition, shape (partitions, workers)."""
        return np.asarray(np.isfinite(self.seconds).any(axis=0))


def lower_bound(units: UnitTimes) -> float:
    """Return a lower bound of the makespan in seconds.

    For an open shop: the time of the longest configuration or of the busiest worker. With replicas: the
    makespan of the best preemptive schedule.
    """
    if units.is_open_shop:
        return float(max(units.matrix.sum(axis=0).max(), units.matrix.sum(axis=1).max()))
    return shares(units.seconds, one_at_a_time=True)[0]


def shares(seconds: NDArray[np.float64], one_at_a_time: bool) -> tuple[float, NDArray[np.float64]]:
    """Return the least makespan, and the share of each unit that each worker processes in it.

    With preemption a makespan is feasible if no worker is busy for longer and, where a configuration can be
    on only one worker at a time, no configuration is either (Lawler and Labetoulle, 1978).

    Parameters
    ----------
    seconds : array of shape (configs, partitions, workers)
        Unit times; infinite if the worker does not have the partition.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    configs, partitions, workers = seconds.shape
    places = np.nonzero(np.isfinite(seconds))
    config, partition, worker = places
    count = len(config)
    columns, limits = np.arange(count), np.arange(workers + configs * one_at_a_time)
    busy = [worker, workers + config] if one_at_a_time else [worker]
    rows = np.concatenate([*busy, limits])
    columns_of_rows = np.concatenate([columns] * len(busy) + [np.full(len(limits), count)])
    terms = np.concatenate([seconds[places]] * len(busy) + [-np.ones(len(limits))])
    units = (config * partitions + partition, columns)
    solution = linprog(
        c=np.append(np.zeros(count), 1.0),
        A_eq=coo_array((np.ones(count), units), shape=(configs * partitions, count + 1)),
        b_eq=np.ones(configs * partitions),
        A_ub=coo_array((terms, (rows, columns_of_rows)), shape=(len(limits), count + 1)),
        b_ub=np.zeros(len(limits)),
        method="highs-ipm",
    )
    found = np.zeros(seconds.shape)
    found[places] = solution.x[:count]
    return float(solution.fun), found
