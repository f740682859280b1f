"""List scheduling: an idle worker begins one of the units that are ready for it, chosen by a rule."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.hopper.residual import Residual
from hetctl.methods.hopper.schedule import Hop, Schedule
from hetctl.methods.hopper.unit_times import UnitTimes

Numbers = NDArray[np.intp]
Rule = Callable[[int, Numbers], int]
"""Function from a worker and the units that are ready for it to one of these units.

A unit's number is configuration * partitions + partition.
"""


def dispatch(units: UnitTimes, rule: Rule) -> Schedule:
    """Return the schedule of CEREBRO's Algorithms 1 and 2 with a rule in place of the shuffle.

    Time advances from completion to completion instead of by WAIT_TIME. The schedule is *dense*: no
    worker is idle while a unit is ready for it.
    """
    return dispatch_residual(Residual.whole(units), rule)


def dispatch_residual(residual: Residual, rule: Rule) -> Schedule:
    """Return the dense schedule of what is left, with times relative to now.

    Absent workers are assumed to return when all that can be done without them is done. Therefore the
    hops before that are valid however long these workers stay absent.
    """
    floor = _Floor(residual)
    hops: list[Hop] = []
    running = sorted(residual.running)
    absent = set(residual.absent)
    now_s = 0.0
    while True:
        for worker in sorted(floor.idle):
            ready = floor.ready_for(worker)
            if not len(ready):
                floor.dismiss(worker)
            else:
                hop = floor.begin(int(rule(worker, ready)), worker, now_s)
                heapq.heappush(running, (hop.end_s, worker, hop.config))
                hops.append(hop)
        if running:
            now_s = running[0][0]
        elif absent:
            floor.idle.update(absent)
            absent.clear()
        else:
            return Schedule(tuple(hops))
        while running and running[0][0] <= now_s:
            _, worker, config = heapq.heappop(running)
            floor.end(worker, config)


class _Floor:
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

    def ready_for(self, worker: int) -> Numbers:
        """Return the units that a worker can begin."""
        at: Numbers = self._at[worker]
        return np.asarray(at[self.ready.ravel()[at]])

    def dismiss(self, worker: int) -> None:
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
