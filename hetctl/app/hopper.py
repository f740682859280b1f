"""Simulation of hops of configurations over partitioned data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hetctl.app.project import Project
from hetctl.app.run.select_run import known_run
from hetctl.inputs.visit_times import UnitTimeTable, read_unit_times, read_visit_log
from hetctl.methods.hopper import SCHEDULERS, SearchOptions
from hetctl.methods.hopper.schedule import UnitTimes, lower_bound, trace_line, visits_of
from hetctl.methods.hopper.simulate import Outage, VisitRecord, simulate_hops
from hetctl.methods.hopper.worker_groups import estimated_costs, modes
from hetctl.model.errors import BadInputError
from hetctl.model.hops import DONE, Visit, VisitEnd
from hetctl.model.plan import HOPPER
from hetctl.model.run_status import TaskSpan
from hetctl.model.simulation import HopSimulation, Simulated
from hetctl.scheduling.planners.base import nearest
from hetctl.storage.visit_fold import FoldLog, VisitFold

AUTO, RANDOMIZED, REPLAY = "auto", "randomized", "replay"
OutageRequest = tuple[str, float, float]
"""Worker, and the start and end of its absence in seconds; the end may be infinite."""
MOST_TIMES = 50_000_000
"""Largest product of configurations, partitions and workers that fits memory."""
FAILED_EXIT_CODE = 1
"""Exit code of a lost visit, for a chart."""
OF_CHART = ("tasks", "config_names", "worker_names")
"""Fields of the result that the JSON lacks: the trace has them."""


def simulated_hops(
    unit_times: Path,
    scheduler: str = "best",
    solver_time_limit_s: float = 0.8,
    seed: int = 0,
    parallelism: str = HOPPER,
    efficiency: float = 1.0,
    epochs: int = 1,
    outages: Sequence[OutageRequest] = (),
) -> Simulated:
    """Simulate the hopper along a plan; with `randomized` each hop is drawn when it is due (CEREBRO).

    The remaining hops are planned again when workers fail, return or join late.

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

    Raises
    ------
    BadInputError
        If the scheduler or an absent worker is unknown, the file is wrong, or its partitions have copies
        that the scheduler or mode does not support.
    InfeasibleError
        If a partition is lost for good before all configurations have visited it.
    """
    if scheduler not in SCHEDULERS:
        raise BadInputError(f"unknown scheduler {scheduler!r}", hint=nearest(scheduler, SCHEDULERS))
    search = SearchOptions(seed=seed, seconds=solver_time_limit_s)
    given = _units(unit_times, read_unit_times(unit_times))
    rule = modes(len(given.configs), len(given.workers))
    started = time.perf_counter()
    costs = estimated_costs(
        given,
        rule if parallelism == AUTO else (parallelism,),
        efficiency=lambda size: efficiency if size > 1 else 1.0,
        schedule=lambda times: SCHEDULERS[scheduler](times, search),
    )
    plan_seconds = time.perf_counter() - started
    cheapest, drawn = costs[0], scheduler == RANDOMIZED
    units = cheapest.units
    # A group cannot continue without any of its workers.
    groups = {given.workers[k]: units.workers[g] for g, part in enumerate(cheapest.groups) for k in part}
    trace = simulate_hops(
        units,
        plan=() if drawn else visits_of(cheapest.schedule, units, epochs),
        seed=seed,
        epochs=epochs,
        outages=_outages(outages, groups),
        reschedule=None if drawn else search,
    )
    return _simulated(
        *(units, trace.records, scheduler, cheapest.mode, epochs, seed),
        plan_seconds=plan_seconds,
        makespans_s={one.mode: one.schedule.makespan_s for one in costs},
    )


def repeated_hops(
    unit_times: Path,
    replay: Path,
    seed: int = 0,
    epochs: int | None = None,
    outages: Sequence[OutageRequest] = (),
) -> Simulated:
    """Simulate the hopper along the completed visits of a log, which take the unit times of a file.

    Parameters
    ----------
    replay : Path
        Trace of a simulation, or of a run.
    seed : int
        Seed of the visits that are drawn: those missing in the log, or at an absent worker.
    epochs : int or None
        Number of epochs of each configuration; None: as many as in the log.

    Raises
    ------
    BadInputError
        If a file is wrong, or an absent worker is unknown.
    InfeasibleError
        If a partition is lost for good before all configurations have visited it.
    """
    table = read_unit_times(unit_times)
    units, plan = _units(unit_times, table), read_visit_log(replay, table)
    epochs = epochs or 1 + max(visit.epoch for visit in plan)
    away = _outages(outages, {worker: worker for worker in units.workers})
    trace = simulate_hops(units, plan=plan, seed=seed, epochs=epochs, outages=away)
    return _simulated(units, trace.records, REPLAY, HOPPER, epochs, seed)


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
        tasks=[
            TaskSpan(
                *(one.visit.config, one.visit.epoch, one.visit.worker, (0,), one.start_s),
                end_s=one.end_s,
                exit_code=FAILED_EXIT_CODE if one.lost else 0,
            )
            for one in records
        ],
        config_names=units.configs,
        worker_names=units.workers,
    )
    fields = {name: value for name, value in vars(found).items() if name not in OF_CHART}
    lines = (trace_line(one.visit, one.start_s, one.end_s, lost=one.lost) for one in records)
    return Simulated(found, fields, lambda: "".join(lines))


def _seconds(records: Iterable[VisitRecord]) -> float:
    return math.fsum(record.end_s - record.start_s for record in records)


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


APART_S = 1e-6
"""Least time between two starts in a trace, whose lines are repeated in the order of their starts."""


def trace_of_run(project: Project, run: str | None) -> tuple[str, list[str]]:
    """Return the name of a run, by default the newest, and a line for each of its visits so far.

    Raises
    ------
    BadInputError
        If no visit has ended.
    """
    spec = known_run(project, run)[0].spec
    names = [member.name for member in spec.ensemble.members]
    visits = FoldLog(VisitFold(), project.home.run(spec.run), names).refresh().visits
    if not visits:
        raise BadInputError(
            f"no visit of run {spec.run} has ended: members hop with --mode hopper, or auto",
            "name another run, or wait for its first visits (`hetctl status`)",
        )
    return spec.run, lines_of(visits)


def lines_of(visits: Sequence[VisitEnd]) -> list[str]:
    """Return the lines of visits that are in the order of their starts.

    Clocks of nodes differ. So a visit that seems to begin before an earlier one begins just after it.
    """
    origin = min(visit.began_at for visit in visits)
    lines, last_s = [], -APART_S
    for visit in visits:
        start_s = last_s = max(visit.began_at - origin, last_s + APART_S)
        end_s = max(visit.ended_at - origin, start_s)
        traced = Visit(visit.number, visit.member, visit.hopper_epoch, f"p{visit.partition}", visit.worker)
        lines.append(trace_line(traced, start_s, end_s, lost=visit.state != DONE))
    return lines
