"""Plans of the visits of a job, from the workloads of its members and the partitions found on its nodes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetctl.methods.hopper.reschedule import Rescheduler
from hetctl.methods.hopper.schedule import SearchOptions, Unit, Visit
from hetctl.methods.hopper.state_machine import HopperState
from hetctl.methods.hopper.unit_times import UnitTimes
from hetctl.model.site import Node
from hetctl.model.workload import Workload


@dataclass(frozen=True)
class HopPlan:
    """Planned visits; times in seconds from the time of planning.

    Parameters
    ----------
    visits : tuple of Visit
        Training visits; evaluation visits take any worker that is idle. Empty: all are drawn.
    """

    visits: tuple[Visit, ...] = ()
    predicted_s: float = 0.0
    lower_bound_s: float = 0.0


class HopPlanner:
    """Planner of the visits of one job.

    Parameters
    ----------
    scheduler : str
        ``best``, or ``randomized`` for CEREBRO's own, which draws all visits.
    partitions : int
        Number of partitions of the data.
    """

    def __init__(self, scheduler: str, partitions: int, search: SearchOptions) -> None:
        self.scheduler = scheduler
        self._partitions, self._search = partitions, search
        self._seen_s: dict[tuple[str, bool], float] = {}
        self._planned: UnitTimes | None = None

    def note(self, visit: Visit, seconds: float) -> None:
        """Record the time of a visit."""
        self._seen_s[visit.config, is_evaluation(visit.epoch)] = seconds

    def seconds(self, unit: Unit, worker: str) -> float:
        """Return the expected time of a visit in seconds: the last one of its kind, or the planned one."""
        seen_s = self._seen_s.get((unit.config, is_evaluation(unit.epoch)), 0.0)
        if seen_s or self._planned is None or is_evaluation(unit.epoch):
            return seen_s
        return _time_in(self._planned, unit, worker)

    def plan(
        self, state: HopperState, left: Mapping[str, Workload], nodes: Sequence[Node], now_s: float
    ) -> HopPlan:
        """Return a plan for the present workers.

        Parameters
        ----------
        left : mapping of str to Workload
            Members that need training, with the work left after their finished epochs.
        """
        configs = [name for name in state.configs if name in left]
        if not configs or not _is_covered(state):
            return HopPlan()
        units = self._planned = unit_times_of([left[name] for name in configs], state, nodes)
        if self.scheduler == "randomized":
            return HopPlan()
        view = training_view(state)
        epochs = {name: view.configs[name] + epochs_left(left[name]) for name in configs}
        visits = Rescheduler(units, epochs, self._search)(view, now_s)
        predicted_s, bound_s = makespan(visits, units), busiest(visits, units)
        return HopPlan(tuple(replace(v, epoch=2 * v.epoch) for v in visits), predicted_s, bound_s)


def is_evaluation(epoch: int) -> bool:
    """Return true if an epoch of the hopper consists of evaluation visits."""
    return epoch % 2 == 1


def epochs_left(workload: Workload) -> int:
    """Return the number of epochs that a member is expected to have left, at least 1."""
    return max(1, math.ceil(workload.samples_left / (workload.samples_per_epoch or math.inf)))


def unit_times_of(members: Iterable[Workload], state: HopperState, nodes: Iterable[Node]) -> UnitTimes:
    """Return the times of training visits on the present workers."""
    members = tuple(members)
    types = {node.name: node.gpu_type or "" for node in nodes}
    has = np.array([[p in state.workers[w] for w in state.workers] for p in state.partitions])
    seconds = np.array(
        [
            [
                _visit_s(member, len(state.partitions), types[worker.rpartition(":")[0]])
                for worker in state.workers
            ]
            for member in members
        ]
    )
    return UnitTimes(
        configs=tuple(member.name for member in members),
        partitions=state.partitions,
        workers=tuple(state.workers),
        seconds=np.where(has[None], seconds[:, None], np.inf),
    )


def _visit_s(member: Workload, partitions: int, gpu_type: str) -> float:
    return (member.samples_per_epoch or 0) / member.on_type(gpu_type).rates[1] / partitions


def training_view(state: HopperState) -> HopperState:
    """Return a state in which the epochs are those of training, without evaluations.

    A configuration that is being evaluated has done all training visits of its epoch.
    """
    return replace(
        state,
        configs={name: epoch // 2 for name, epoch in state.configs.items()},
        running=_of_training(state.running),
        log=_of_training(state.log),
    )


def _of_training(visits: Iterable[Visit]) -> tuple[Visit, ...]:
    return tuple(replace(v, epoch=v.epoch // 2) for v in visits if not is_evaluation(v.epoch))


def makespan(visits: Iterable[Visit], units: UnitTimes) -> float:
    """Return the end of the last of some visits, each as early as its configuration and worker are free."""
    free: defaultdict[str, float] = defaultdict(float)
    for visit in visits:
        end_s = max(free[visit.config], free[visit.worker]) + _time_in(units, visit.unit, visit.worker)
        free[visit.config] = free[visit.worker] = end_s
    return max(free.values(), default=0.0)


def busiest(visits: Iterable[Visit], units: UnitTimes) -> float:
    """Return the longest total time of a configuration or of a worker in some visits."""
    total: defaultdict[str, float] = defaultdict(float)
    for visit in visits:
        seconds = _time_in(units, visit.unit, visit.worker)
        total[visit.config] += seconds
        total[visit.worker] += seconds
    return max(total.values(), default=0.0)


def _time_in(units: UnitTimes, unit: Unit, worker: str) -> float:
    if unit.config not in units.configs or worker not in units.workers:
        return 0.0
    row, column = units.configs.index(unit.config), units.workers.index(worker)
    return float(units.seconds[row, units.partitions.index(unit.partition), column])


def _is_covered(state: HopperState) -> bool:
    """Return true if every partition is on some present worker."""
    return set().union(*state.workers.values()).issuperset(state.partitions)
