"""Simulation of hops of configurations over partitioned data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hetctl.inputs.visit_times import UnitTimeTable, read_unit_times, read_visit_log
from hetctl.methods.hopper import SCHEDULERS, SearchOptions
from hetctl.methods.hopper.schedule import UnitTimes, lower_bound, trace_line, visits_of
from hetctl.methods.hopper.simulate import Outage, VisitRecord, simulate_hops
from hetctl.methods.hopper.worker_groups import estimated_costs, modes
from hetctl.model.errors import BadInputError
from hetctl.model.plan import HOPPER
from hetctl.model.run_status import TaskSpan
from hetctl.model.simulation import HopSimulation, Simulated
from hetctl.model.values import dataclass
from hetctl.scheduling.planners.base import nearest

AUTO, RANDOMIZED, REPLAY = "auto", "randomized", "replay"
OutageRequest = tuple[str, float, float]
"""Worker, and the start and end of its absence in seconds; the end may be infinite."""
MOST_TIMES = 50_000_000
"""Largest product of configurations, partitions and workers that fits memory."""
FAILED_EXIT_CODE = 1
"""Exit code of a lost visit, for a chart."""
OF_CHART = ("tasks", "config_names", "worker_names")
"""Fields of the result that the JSON lacks: the trace has them."""


@dataclass(frozen=True)
class HopperRequest:
    """Input of a simulation of hops.

    Parameters
    ----------
    unit_times : Path
        File of unit times.
    solver_time_limit_s : float
        Largest search time of a scheduler in seconds.
    parallelism : str
        ``hopper``, ``hybrid``, ``data-parallel``, or ``auto``: the cheapest that the rule of CEREBRO's
        appendix 12 admits.
    efficiency : float
        Share of the ideal rate that workers reach when they train together.
    """

    unit_times: Path
    scheduler: str = "best"
    solver_time_limit_s: float = 0.8
    seed: int = 0
    parallelism: str = HOPPER
    efficiency: float = 1.0
    epochs: int = 1
    outages: Sequence[OutageRequest] = ()

    def simulated(self) -> Simulated:
        """Simulate the hopper along a plan; with `randomized` each hop is drawn when it is due (CEREBRO).

        The remaining hops are planned again when workers fail, return or join late.

        Raises
        ------
        BadInputError
            If the scheduler or an absent worker is unknown, the file is wrong, or its partitions have copies
            that the scheduler or mode does not support.
        InfeasibleError
            If a partition is lost for good before all configurations have visited it.
        """
        if self.scheduler not in SCHEDULERS:
            raise BadInputError(
                f"unknown scheduler {self.scheduler!r}", hint=nearest(self.scheduler, SCHEDULERS)
            )
        search = SearchOptions(seed=self.seed, seconds=self.solver_time_limit_s)
        given = _units(self.unit_times, read_unit_times(self.unit_times))
        rule = modes(len(given.configs), len(given.workers))
        started = time.perf_counter()
        costs = estimated_costs(
            given,
            rule if self.parallelism == AUTO else (self.parallelism,),
            efficiency=lambda size: self.efficiency if size > 1 else 1.0,
            schedule=lambda times: SCHEDULERS[self.scheduler](times, search),
        )
        plan_seconds = time.perf_counter() - started
        cheapest, drawn = costs[0], self.scheduler == RANDOMIZED
        units = cheapest.units
        # A group cannot continue without any of its workers.
        groups = {given.workers[k]: units.workers[g] for g, part in enumerate(cheapest.groups) for k in part}
        trace = simulate_hops(
            units,
            plan=() if drawn else visits_of(cheapest.schedule, units, self.epochs),
            seed=self.seed,
            epochs=self.epochs,
            outages=_outages(self.outages, groups),
            reschedule=None if drawn else search,
        )
        makespans_s = {one.mode: one.schedule.makespan_s for one in costs}
        return _simulated(
            *(units, trace.records, self.scheduler, cheapest.mode, self.epochs, self.seed),
            plan_seconds=plan_seconds,
            makespans_s=makespans_s,
        )


@dataclass(frozen=True)
class HopReplayRequest:
    """Input of a repetition of completed visits, which take the unit times of a file.

    Parameters
    ----------
    replay : Path
        Trace of a simulation, or of a run.
    seed : int
        Seed of the visits that are drawn: those missing in the log, or at an absent worker.
    epochs : int or None
        Number of epochs of each configuration; None: as many as in the log.
    """

    unit_times: Path
    replay: Path
    seed: int = 0
    epochs: int | None = None
    outages: Sequence[OutageRequest] = ()

    def simulated(self) -> Simulated:
        """Simulate the hopper along the completed visits of the log.

        Raises
        ------
        BadInputError
            If a file is wrong, or an absent worker is unknown.
        InfeasibleError
            If a partition is lost for good before all configurations have visited it.
        """
        table = read_unit_times(self.unit_times)
        units = _units(self.unit_times, table)
        plan = read_visit_log(self.replay, table)
        epochs = self.epochs or 1 + max(visit.epoch for visit in plan)
        away = _outages(self.outages, {worker: worker for worker in units.workers})
        trace = simulate_hops(units, plan=plan, seed=self.seed, epochs=epochs, outages=away)
        return _simulated(units, trace.records, REPLAY, HOPPER, epochs, self.seed)


def _simulated(
    units: UnitTimes,
    records: Sequence[VisitRecord],
    scheduler: str,
    mode: str,
    epochs: int,
    seed: int,
    plan_seconds: float = 0.0,
    makespans_s: Mapping[str, float] | None = None,
) -> Simulated:
    """Return visits, in the order of their starts, with their distance from the lower bound."""
    done = [record for record in records if not record.lost]
    makespan_s, bound_s = max(record.end_s for record in done), epochs * lower_bound(units)
    whole_s = len(units.workers) * makespan_s
    found = HopSimulation(
        scheduler=scheduler,
        mode=mode,
        configs=len(units.configs),
        partitions=len(units.partitions),
        workers=len(units.workers),
        epochs=epochs,
        seed=seed,
        makespan_s=makespan_s,
        lower_bound_s=bound_s,
        ratio=makespan_s / bound_s if bound_s else 1.0,
        gpu_busy_fraction=_seconds(done) / whole_s if whole_s else 1.0,
        lost_s=_seconds(record for record in records if record.lost),
        plan_seconds=plan_seconds,
        makespans_s=makespans_s or {},
        tasks=[_task(record) for record in records],
        config_names=units.configs,
        worker_names=units.workers,
    )
    fields = {name: value for name, value in vars(found).items() if name not in OF_CHART}
    lines = (trace_line(one.visit, one.start_s, one.end_s, lost=one.lost) for one in records)
    return Simulated(found, fields, lambda: "".join(lines))


def _seconds(records: Iterable[VisitRecord]) -> float:
    return math.fsum(record.end_s - record.start_s for record in records)


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


def _outages(outages: Iterable[OutageRequest], groups: Mapping[str, str]) -> list[Outage]:
    found = []
    for worker, start_s, end_s in outages:
        if worker not in groups:
            raise BadInputError(f"there is no worker {worker!r} for --outage", hint=nearest(worker, groups))
        found.append(Outage(groups[worker], start_s, end_s))
    return found


def _units(path: Path, table: UnitTimeTable) -> UnitTimes:
    shape = (len(table.configs), len(table.partitions), len(table.workers))
    if math.prod(shape) > MOST_TIMES:
        counts = "{:,} configurations, {:,} partitions and {:,} workers".format(*shape)
        raise BadInputError(f"{path}: {counts} have a product of more than {MOST_TIMES:,}")
    seconds = np.full(shape, np.inf)
    for place, value in table.seconds.items():
        seconds[place] = value
    return UnitTimes(table.configs, table.partitions, table.workers, seconds)
