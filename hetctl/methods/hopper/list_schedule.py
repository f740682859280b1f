"""List scheduling: an idle worker begins one of the units that are ready for it, chosen by a rule.

The rule is a random choice in `randomized`, CEREBRO's own scheduler, and the longest remaining time in
`dense`, the starting point of searches.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.hopper.schedule import Hop, Schedule, SearchOptions, UnitTimes
from hetctl.model.values import dataclass

NOISES = (0.1, 0.02, 0.2, 0.05, 0.4)
"""Noise levels of `dense` to try in turn, as shares of the longest configuration's time."""

Indices = NDArray[np.intp]
Release = tuple[float, int, int]
"""End of a running unit in seconds from now, its worker and its configuration."""


@dataclass(frozen=True, eq=False)
class Residual:
    """Units that are neither done nor running, and the times at which workers become free.

    Parameters
    ----------
    waiting : array of bool of shape (configs, partitions)
        Waiting units of the configurations' present epochs.
    epochs : array of int of shape (configs,)
        Whole epochs that follow.
    running : tuple of Release
        Running units, which are not preempted.
    absent : frozenset of int
        Workers that are absent for an unknown time.
    """

    units: UnitTimes
    waiting: NDArray[np.bool_]
    epochs: NDArray[np.intp]
    running: tuple[Release, ...] = ()
    absent: frozenset[int] = frozenset()

    @classmethod
    def whole(cls, units: UnitTimes) -> Residual:
        """Return the residual problem of an epoch that has not begun, with all workers present."""
        configs, partitions, _ = units.seconds.shape
        return cls(units, np.ones((configs, partitions), dtype=bool), np.zeros(configs, dtype=np.intp))


Rule = Callable[[int, Indices], int]
"""Function from a worker and the units that are ready for it to one of these units.

A unit's number is configuration * partitions + partition.
"""


def dispatch(residual: Residual, rule: Rule) -> Schedule:
    """Return the schedule of CEREBRO's Algorithms 1 and 2 with a rule in place of the shuffle.

    Time advances from completion to completion instead of by WAIT_TIME, and counts from now. The schedule is
    *dense*: no worker is idle while a unit is ready for it. Absent workers are assumed to return when all
    that can be done without them is done. So the hops before that are valid however long they stay absent.
    """
    state = _DispatchState(residual)
    hops: list[Hop] = []
    running = sorted(residual.running)
    absent = set(residual.absent)
    now_s = 0.0
    while True:
        # Sets have no order of their own: sorting makes schedules repeatable.
        for worker in sorted(state.idle):
            ready = state.ready_for(worker)
            if not len(ready):
                state.drop_if_done(worker)
            else:
                hop = state.begin(int(rule(worker, ready)), worker, now_s)
                heapq.heappush(running, (hop.end_s, worker, hop.config))
                hops.append(hop)
        if running:
            now_s = running[0][0]
        elif absent:
            state.idle.update(absent)
            absent.clear()
        else:
            return Schedule(tuple(hops))
        # All ends of a time come before the next choice, or it would depend on their order.
        while running and running[0][0] <= now_s:
            _, worker, config = heapq.heappop(running)
            state.end(worker, config)


class _DispatchState:
    """Idle workers, and the units that are waiting or ready.

    Parameters
    ----------
    waiting : array of shape (configs, partitions)
        Waiting units, Q in the paper, of the configurations' present epochs.
    ready : array of shape (configs, partitions)
        Waiting units of idle configurations.
    """

    def __init__(self, residual: Residual) -> None:
        units = residual.units
        self._seconds = units.seconds
        available = np.isfinite(units.seconds).reshape(-1, len(units.workers))
        self._at = [np.flatnonzero(here) for here in available.T]
        self._epochs = residual.epochs.tolist()
        self._epochs_left = sum(self._epochs)
        self.waiting = residual.waiting.copy()
        self.ready = np.zeros_like(self.waiting)
        busy = {worker for _, worker, _ in residual.running}
        self.idle = set(range(len(units.workers))) - busy - residual.absent
        training = {config for _, _, config in residual.running}
        for config in set(range(len(units.configs))) - training:
            self._make_ready(config)

    def ready_for(self, worker: int) -> Indices:
        """Return the units that a worker can begin."""
        at: Indices = self._at[worker]
        return np.asarray(at[self.ready.ravel()[at]])

    def drop_if_done(self, worker: int) -> None:
        """Remove a worker from the idle ones if it has no units left to wait for."""
        if not self._epochs_left and not self.waiting.ravel()[self._at[worker]].any():
            self.idle.remove(worker)

    def begin(self, unit: int, worker: int, now_s: float) -> Hop:
        """Start a unit on a worker."""
        config, partition = divmod(unit, self.waiting.shape[1])
        self.waiting[config, partition] = False
        self.ready[config] = False
        self.idle.remove(worker)
        return Hop(config, partition, worker, now_s, now_s + float(self._seconds[config, partition, worker]))

    def end(self, worker: int, config: int) -> None:
        """Mark a worker and a configuration as idle again (Algorithm 2)."""
        self._make_ready(config)
        self.idle.add(worker)

    def _make_ready(self, config: int) -> None:
        """Mark a configuration's units as ready, those of its next epoch if none of this one is left."""
        if self._epochs[config] and not self.waiting[config].any():
            self.waiting[config] = True
            self._epochs[config] -= 1
            self._epochs_left -= 1
        self.ready[config] = self.waiting[config]


def dense(residual: Residual, noise: float = 0.0, seed: int = 0) -> Schedule:
    """Return the dense schedule in which a worker begins the unit with the most remaining time.

    The remaining time is that of its configuration plus that of its partition, future epochs included.

    Parameters
    ----------
    noise : float
        Upper limit of the random time added to the remaining time, as a share of the longest
        configuration's time.
    """
    return dispatch(residual, _longest_left(residual, noise, np.random.default_rng(seed)))


def _longest_left(residual: Residual, noise: float, draw: np.random.Generator) -> Rule:
    seconds = residual.units.fastest
    left_s = seconds * (residual.waiting + residual.epochs[:, None])
    configs_s, partitions_s = left_s.sum(axis=1), left_s.sum(axis=0)
    spread_s = noise * configs_s.max()
    count = seconds.shape[1]

    def rule(_worker: int, ready: Indices) -> int:
        configs, partitions = np.divmod(ready, count)
        left_s = configs_s[configs] + partitions_s[partitions] + spread_s * draw.random(len(ready))
        at = left_s.argmax()
        config, partition = configs[at], partitions[at]
        configs_s[config] -= seconds[config, partition]
        partitions_s[partition] -= seconds[config, partition]
        return int(ready[at])

    return rule


def randomized(units: UnitTimes, options: SearchOptions) -> Schedule:
    """Return a random dense schedule (CEREBRO, Algorithms 1 and 2).

    With replicas, any worker that has the partition may process a unit (section 4.5).
    """
    draw = random.Random(options.seed)

    def any_of(_worker: int, ready: Indices) -> int:
        return int(ready[draw.randrange(len(ready))])

    return dispatch(Residual.whole(units), any_of)
