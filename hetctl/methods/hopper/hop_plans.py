"""Plans of visits: of several epochs, of a job, and new ones when a worker fails, returns or joins late."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from itertools import count, takewhile
from operator import attrgetter

import numpy as np

from hetctl.methods.hopper import SCHEDULERS
from hetctl.methods.hopper.list_schedule import NOISES, Indices, Residual, dense, dispatch
from hetctl.methods.hopper.schedule import Hop, Schedule, SearchOptions, UnitTimes, visits_of
from hetctl.methods.hopper.state_machine import Hopper
from hetctl.methods.hopper.worker_groups import Homes, HopWorker, group_size, visit_times
from hetctl.model.errors import BadInputError
from hetctl.model.hops import Unit, Visit, gpus_in, node_of
from hetctl.model.site import Node
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload

SHRUNK = 0.75
"""Share of a schedule's configurations: if no more of them are left, a new schedule is made."""


def planned_visits(
    train: UnitTimes,
    evaluate: UnitTimes,
    epochs: Mapping[str, int],
    search: SearchOptions,
    scheduler: str = "best",
) -> tuple[Visit, ...]:
    """Return the visits of all epochs in an order in which they can start: a plan for `Hopper`.

    Training epoch e, counted from 0, is epoch 2 e of the hopper, and its evaluation epoch 2 e + 1. A new
    schedule is made whenever many configurations have left.

    Parameters
    ----------
    train, evaluate : UnitTimes
        Times of the visits, of the same configurations, partitions and workers.
    epochs : mapping of str to int
        Number of training epochs of each configuration.
    search : SearchOptions
        Options of the scheduler; all schedules share its seconds.
    scheduler : str
        Name of the scheduler of the training visits.

    Raises
    ------
    BadInputError
        If the scheduler does not support partitions with several workers, or workers with several.
    """
    sets = _sets(epochs)
    each = replace(search, seconds=search.seconds / max(len(set(sets)), 1))
    schedules = {
        configs: _epoch(train.of_configs(configs), evaluate.of_configs(configs), each, scheduler)
        for configs in dict.fromkeys(sets)
    }
    visits = (
        replace(visit, epoch=2 * epoch + visit.epoch)
        for epoch, configs in enumerate(sets)
        for visit in schedules[configs]
    )
    left = (visit for visit in visits if visit.epoch < 2 * epochs[visit.config])
    return tuple(replace(visit, number=number) for number, visit in enumerate(left))


def _epoch(train: UnitTimes, evaluate: UnitTimes, search: SearchOptions, scheduler: str) -> tuple[Visit, ...]:
    """Return one epoch's training visits as the hopper's epoch 0, and its evaluation visits as epoch 1."""
    schedule = SCHEDULERS[scheduler](train, search)
    evaluation = visits_of(_evaluation(schedule, evaluate), evaluate)
    return (*visits_of(schedule, train), *(replace(visit, epoch=1) for visit in evaluation))


def _evaluation(trained: Schedule, evaluate: UnitTimes) -> Schedule:
    """Return a dense schedule of the evaluation, in which the configurations that end first go first."""
    ends_s: defaultdict[int, float] = defaultdict(float)
    for hop in trained.hops:
        ends_s[hop.config] = max(ends_s[hop.config], hop.end_s)
    rank = {config: place for place, config in enumerate(sorted(ends_s, key=lambda c: (ends_s[c], c)))}
    partitions = len(evaluate.partitions)

    def first_ended(_worker: int, ready: Indices) -> int:
        return int(min(ready, key=lambda unit: rank[unit // partitions]))

    return dispatch(Residual.whole(evaluate), first_ended)


def _sets(epochs: Mapping[str, int]) -> list[frozenset[str]]:
    """Return for each epoch the configurations that its schedule covers, a superset of those left."""
    sets: list[frozenset[str]] = []
    for epoch in range(max(epochs.values(), default=0)):
        left = frozenset(config for config, count in epochs.items() if count > epoch)
        sets.append(left if not sets or len(left) <= SHRUNK * len(sets[-1]) else sets[-1])
    return sets


HopPlan = tuple[tuple[Visit, ...], float, float]
"""Visits in an order in which they could start, their predicted time, and its lower bound, in seconds.

Other visits are drawn: all if the plan is empty, and evaluation visits after a change of workers.
"""
NO_PLAN: HopPlan = (), 0.0, 0.0


class HopPlanner:
    """Planner of the visits of one job.

    Parameters
    ----------
    scheduler : str
        Name of the scheduler of the first plan; ``randomized`` is CEREBRO's own, which draws all visits.
        Later plans are those of `Rescheduler`, since workers wait for them.
    forms_groups : bool
        True if several GPUs may train a member together.
    """

    def __init__(self, scheduler: str, search: SearchOptions, *, forms_groups: bool = True) -> None:
        self.scheduler = scheduler
        self._search = search
        self._forms_groups = forms_groups
        self._seen: dict[tuple[str, bool, int], tuple[Visit, float]] = {}
        self._guesses: frozenset[str] = frozenset()
        self._known = 0
        self._times: tuple[UnitTimes, ...] = ()

    def group_size(
        self, members: Sequence[Workload], partitions: Sequence[str], nodes: Sequence[Node], homes: Homes
    ) -> int:
        """Return the number of GPUs of a worker, as `hetctl.methods.hopper.worker_groups.group_size`."""
        return group_size(members, partitions, nodes, homes) if self._forms_groups else 1

    def note(self, visit: Visit, seconds: float) -> bool:
        """Record the time of a visit; return true if its plan was made from guesses, and is outdated.

        Each plan of them is for twice as many seen members as the one before, since workers wait for plans.
        """
        self._seen[_kind(visit.unit, visit.worker)] = visit, seconds
        return self._known < self._seen_guesses >= min(2 * self._known, len(self._guesses))

    @property
    def _seen_guesses(self) -> int:
        return len({name for name, evaluates, _ in self._seen if not evaluates} & self._guesses)

    def seconds(self, unit: Unit, worker: str) -> float:
        """Return the expected time of a visit in seconds.

        It is the time of the last visit of its kind, scaled by the ratio of their planned times: types of GPU
        and partitions differ. Before the first such visit, it is the planned time, or 0 if that is a guess:
        there is no other way to learn it.
        """
        planned_s = self._planned_s(unit, worker)
        if (seen := self._seen.get(_kind(unit, worker))) is None:
            return 0.0 if unit.config in self._guesses else planned_s
        visit, seconds = seen
        then_s = self._planned_s(visit.unit, visit.worker)
        return seconds * planned_s / then_s if planned_s and then_s else seconds

    def _planned_s(self, unit: Unit, worker: str) -> float:
        """Return the planned time of a visit; 0 if the last plan does not have its member and worker."""
        return _time_in(self._times[is_evaluation(unit.epoch)], unit, worker) if self._times else 0.0

    def plan(
        self, hopper: Hopper, left: Mapping[str, Workload], nodes: Sequence[Node], now_s: float
    ) -> HopPlan:
        """Return a plan for the present workers of a hopper.

        Parameters
        ----------
        left : mapping of str to Workload
            Members that need training, with the work left after their finished epochs.
        """
        members = [left[name] for name in hopper.configs if name in left]
        if not members or not set().union(*hopper.workers.values()).issuperset(hopper.partitions):
            return NO_PLAN
        self._times = tuple(_times(members, hopper, nodes, evaluates=kind) for kind in (False, True))
        if self.scheduler == "randomized":
            return NO_PLAN
        guesses = {member.name for member in members if member.is_guess}
        self._times = (self._as_seen(self._times[0], guesses), self._times[1])
        epochs = {
            # At least one epoch is left.
            member.name: max(1, math.ceil(member.samples_left / (member.samples_per_epoch or math.inf)))
            for member in members
        }
        visits = self._visits(hopper, epochs, now_s)
        free: defaultdict[str, float] = defaultdict(float)
        total: defaultdict[str, float] = defaultdict(float)
        for visit in visits:
            seconds = self._planned_s(visit.unit, visit.worker)
            # Each visit starts as soon as its configuration and worker are free.
            free[visit.config] = free[visit.worker] = max(free[visit.config], free[visit.worker]) + seconds
            total[visit.config] += seconds
            total[visit.worker] += seconds
        return visits, max(free.values(), default=0.0), max(total.values(), default=0.0)

    def _as_seen(self, train: UnitTimes, guesses: Set[str]) -> UnitTimes:
        """Return unit times in which guesses are as long as visits seen of the member, or else of others."""
        ratios: dict[str, float] = {}
        for (name, evaluates, _), (visit, seconds) in self._seen.items():
            if name in guesses and not evaluates and (then_s := _time_in(train, visit.unit, visit.worker)):
                ratios[name] = seconds / then_s
        self._guesses = frozenset(guesses)
        self._known = self._seen_guesses
        usual = statistics.median(ratios.values()) if ratios else 1.0
        factors = [ratios.get(name, usual) if name in guesses else 1.0 for name in train.configs]
        return replace(train, seconds=train.seconds * np.array(factors)[:, None, None])

    def _visits(self, hopper: Hopper, epochs: Mapping[str, int], now_s: float) -> tuple[Visit, ...]:
        """Return planned visits: of whole epochs if none has begun, and else of what is left."""
        train, evaluate = self._times
        if not hopper.log and not hopper.running:
            with suppress(BadInputError):  # A scheduler may not support partitions at several workers.
                visits = planned_visits(train, evaluate, epochs, self._search, self.scheduler)
                return tuple(replace(v, epoch=hopper.configs[v.config] + v.epoch) for v in visits)
        total = {name: hopper.configs[name] // 2 + count for name, count in epochs.items()}
        return Rescheduler(train, total, self._search, passes=2)(hopper, now_s)


def _times(
    members: Sequence[Workload], hopper: Hopper, nodes: Iterable[Node], *, evaluates: bool
) -> UnitTimes:
    types = {node.name: node.gpu_type or "" for node in nodes}
    workers = {
        name: HopWorker(types[node_of(name)], has, len(gpus_in(name))) for name, has in hopper.workers.items()
    }
    # States go through memory: their time is a small part of a visit.
    hop_s = {member.name: 0.0 for member in members}
    return visit_times(members, hopper.partitions, workers, hop_s, evaluates=evaluates)


def _kind(unit: Unit, worker: str) -> tuple[str, bool, int]:
    """Return what the time of a visit depends on: member, evaluation or not, and number of GPUs."""
    return unit.config, is_evaluation(unit.epoch), len(gpus_in(worker))


def is_evaluation(epoch: int) -> bool:
    """Return true if an epoch of the hopper consists of evaluation visits."""
    return epoch % 2 == 1


def _time_in(units: UnitTimes, unit: Unit, worker: str) -> float:
    if unit.config not in units.configs or worker not in units.workers:
        return 0.0
    row, column = units.configs.index(unit.config), units.workers.index(worker)
    return float(units.seconds[row, units.partitions.index(unit.partition), column])


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
