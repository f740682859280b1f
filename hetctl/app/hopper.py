"""Planning and simulation of hops of configurations over partitioned data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetctl.inputs.unit_time_table import UnitTimeTable, read_unit_times
from hetctl.inputs.visit_log import read_visit_log
from hetctl.methods.hopper import SCHEDULERS, SearchOptions
from hetctl.methods.hopper.modes import ModeCost, estimated_costs, modes
from hetctl.methods.hopper.schedule import by_start, trace_line, visits_of
from hetctl.methods.hopper.simulate import Outage, VisitRecord, simulate_hops
from hetctl.methods.hopper.unit_times import UnitTimes, lower_bound
from hetctl.model.errors import BadInputError
from hetctl.model.plan import HOPPER
from hetctl.model.run_status import TaskSpan
from hetctl.scheduling.planners.base import nearest

AUTO, RANDOMIZED, REPLAY = "auto", "randomized", "replay"
OutageRequest = tuple[str, float, float]
"""Worker, and the start and end of its absence in seconds; the end may be infinite."""
MOST_TIMES = 50_000_000
"""Largest product of configurations, partitions and workers that fits memory."""
FAILED_EXIT_CODE = 1
"""Exit code of a lost visit, for a chart."""


@dataclass(frozen=True)
class HopperRequest:
    """Input of planning hops.

    Parameters
    ----------
    unit_times : Path
        File of unit times.
    solver_time_limit_s : float
        Largest search time of a scheduler in seconds.
    mode : str
        ``hopper``, ``hybrid``, ``data-parallel``, or ``auto``: the cheapest that the rule of CEREBRO's
        appendix 12 admits.
    efficiency : float
        Share of the ideal rate that workers reach when they train together.
    """

    unit_times: Path
    scheduler: str = "best"
    solver_time_limit_s: float = 0.8
    seed: int = 0
    mode: str = HOPPER
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        """Raise BadInputError on an unknown scheduler before any file is read."""
        if self.scheduler not in SCHEDULERS:
            raise BadInputError(
                f"unknown scheduler {self.scheduler!r}", hint=nearest(self.scheduler, SCHEDULERS)
            )

    @property
    def search(self) -> SearchOptions:
        """Options of the scheduler."""
        return SearchOptions(seed=self.seed, seconds=self.solver_time_limit_s)


@dataclass(frozen=True)
class HopperOutcome:
    """Hops of configurations, with their distance from the lower bound.

    Parameters
    ----------
    scheduler : str
        Source of the order: a scheduler's name, or ``replay`` for a log.
    units : UnitTimes
        Unit times as seen by the hopper; its workers are groups if workers train together.
    records : tuple of VisitRecord
        Visits of configurations at workers with their times, in the order of their starts.
    lower_bound_s : float
        Lower bound in seconds of the makespan without preemption and failures of workers.
    plan_seconds : float
        Time that the scheduler took, in seconds.
    makespans_s : mapping of str to float
        Planned makespan of an epoch in seconds, by mode, of all modes considered; empty for a replay.
    """

    scheduler: str
    seed: int
    mode: str
    units: UnitTimes
    records: tuple[VisitRecord, ...]
    lower_bound_s: float
    plan_seconds: float
    makespans_s: Mapping[str, float]
    epochs: int = 1

    @property
    def makespan_s(self) -> float:
        """Time when the last unit is done, in seconds."""
        return max(record.end_s for record in self.records if not record.lost)

    @property
    def ratio(self) -> float:
        """Makespan divided by the bound; 1 is optimal."""
        return self.makespan_s / self.lower_bound_s if self.lower_bound_s else 1.0

    @property
    def lost_s(self) -> float:
        """Seconds of workers whose results were lost by failures."""
        return math.fsum(record.end_s - record.start_s for record in self.records if record.lost)

    @property
    def gpu_busy_fraction(self) -> float:
        """Share of all workers' time until the makespan that was spent on completed units."""
        done_s = math.fsum(record.end_s - record.start_s for record in self.records if not record.lost)
        whole_s = len(self.units.workers) * self.makespan_s
        return done_s / whole_s if whole_s else 1.0

    @property
    def tasks(self) -> tuple[TaskSpan, ...]:
        """Visits as tasks for a chart of workers."""
        return tuple(_task(record) for record in self.records)


def plan_hops(request: HopperRequest) -> HopperOutcome:
    """Plan one epoch.

    Raises
    ------
    BadInputError
        If the file is wrong, or its partitions have copies that the scheduler or mode does not support.
    """
    chosen = _choose(request)
    schedule = chosen.cheapest.schedule
    visits = visits_of(schedule, chosen.cheapest.units)
    hops = sorted(schedule.hops, key=by_start)
    records = [VisitRecord(visit, hop.start_s, hop.end_s) for visit, hop in zip(visits, hops, strict=True)]
    return chosen.outcome(request, records)


def run_hops(request: HopperRequest, epochs: int = 1, outages: Iterable[OutageRequest] = ()) -> HopperOutcome:
    """Simulate the hopper along a plan; with `randomized` the next hop is drawn each time, as in CEREBRO.

    The remaining hops are planned again when workers fail, return or join late.

    Raises
    ------
    BadInputError
        As in `plan_hops`; also if an absent worker is unknown.
    InfeasibleError
        If a partition is lost for good before all configurations have visited it.
    """
    chosen = _choose(request)
    units = chosen.cheapest.units
    drawn = request.scheduler == RANDOMIZED
    trace = simulate_hops(
        units,
        plan=() if drawn else visits_of(chosen.cheapest.schedule, units, epochs),
        seed=request.seed,
        epochs=epochs,
        outages=_outages(outages, chosen.groups),
        reschedule=None if drawn else request.search,
    )
    return chosen.outcome(request, trace.records, epochs)


def replay_hops(
    unit_times: Path,
    log: Path,
    *,
    epochs: int | None = None,
    seed: int = 0,
    outages: Iterable[OutageRequest] = (),
) -> HopperOutcome:
    """Simulate the hopper along the completed visits of a log, which take the unit times of the file.

    Parameters
    ----------
    log : Path
        Log in the format of `trace_of`.
    epochs : int or None
        Number of epochs of each configuration; None: as many as in the log.
    seed : int
        Seed of the visits that are drawn: those missing in the log, or at an absent worker.

    Raises
    ------
    BadInputError
        If a file is wrong, or an absent worker is unknown.
    InfeasibleError
        If a partition is lost for good before all configurations have visited it.
    """
    table = read_unit_times(unit_times)
    units = _units(unit_times, table)
    plan = read_visit_log(log, table)
    wanted = epochs or 1 + max(visit.epoch for visit in plan)
    trace = simulate_hops(
        units,
        plan=plan,
        seed=seed,
        epochs=wanted,
        outages=_outages(outages, {worker: worker for worker in units.workers}),
    )
    return HopperOutcome(
        scheduler=REPLAY,
        seed=seed,
        mode=HOPPER,
        units=units,
        records=trace.records,
        lower_bound_s=wanted * lower_bound(units),
        plan_seconds=0.0,
        makespans_s={},
        epochs=wanted,
    )


def trace_of(outcome: HopperOutcome) -> str:
    """Return one line of JSON for each visit."""
    return "".join(
        trace_line(record.visit, record.start_s, record.end_s, lost=record.lost) for record in outcome.records
    )


def _task(record: VisitRecord) -> TaskSpan:
    return TaskSpan(
        member=record.visit.config,
        round=record.visit.epoch,
        node=record.visit.worker,
        gpus=(0,),
        start_s=record.start_s,
        end_s=record.end_s,
        exit_code=FAILED_EXIT_CODE if record.lost else 0,
    )


@dataclass(frozen=True)
class _Chosen:
    """The cheapest mode with its schedule, and all others considered."""

    workers: tuple[str, ...]
    costs: Sequence[ModeCost]
    plan_seconds: float

    @property
    def cheapest(self) -> ModeCost:
        return self.costs[0]

    @property
    def groups(self) -> Mapping[str, str]:
        """Groups that cannot continue without a worker, by the worker's name."""
        names = self.cheapest.units.workers
        return {self.workers[k]: names[g] for g, part in enumerate(self.cheapest.groups) for k in part}

    def outcome(
        self, request: HopperRequest, records: Iterable[VisitRecord], epochs: int = 1
    ) -> HopperOutcome:
        return HopperOutcome(
            scheduler=request.scheduler,
            seed=request.seed,
            mode=self.cheapest.mode,
            units=self.cheapest.units,
            records=tuple(records),
            lower_bound_s=epochs * lower_bound(self.cheapest.units),
            plan_seconds=self.plan_seconds,
            makespans_s={one.mode: one.schedule.makespan_s for one in self.costs},
            epochs=epochs,
        )


def _outages(outages: Iterable[OutageRequest], groups: Mapping[str, str]) -> list[Outage]:
    found = []
    for worker, start_s, end_s in outages:
        if worker not in groups:
            raise BadInputError(f"there is no worker {worker!r} for --outage", hint=nearest(worker, groups))
        found.append(Outage(groups[worker], start_s, end_s))
    return found


def _choose(request: HopperRequest) -> _Chosen:
    units = _units(request.unit_times, read_unit_times(request.unit_times))
    rule = modes(len(units.configs), len(units.workers))
    started = time.perf_counter()
    costs = estimated_costs(
        units,
        rule if request.mode == AUTO else (request.mode,),
        efficiency=lambda size: request.efficiency if size > 1 else 1.0,
        schedule=lambda times: SCHEDULERS[request.scheduler](times, request.search),
    )
    return _Chosen(units.workers, costs, time.perf_counter() - started)


def _units(path: Path, table: UnitTimeTable) -> UnitTimes:
    shape = (len(table.configs), len(table.partitions), len(table.workers))
    if math.prod(shape) > MOST_TIMES:
        counts = "{:,} configurations, {:,} partitions and {:,} workers".format(*shape)
        raise BadInputError(f"{path}: {counts} have a product of more than {MOST_TIMES:,}")
    seconds = np.full(shape, np.inf)
    for place, value in table.seconds.items():
        seconds[place] = value
    return UnitTimes(table.configs, table.partitions, table.workers, seconds)
