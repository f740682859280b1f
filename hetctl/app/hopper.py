"""Hops of configurations over partitioned data: planned, and simulated."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetctl.inputs.unit_time_table import UnitTimeTable, read_unit_times
from hetctl.inputs.visit_log import read_visit_log
from hetctl.methods.hopper import SCHEDULERS, SearchOptions
from hetctl.methods.hopper.epochs import simulate_hops
from hetctl.methods.hopper.mode_costs import ModeCost, price
from hetctl.methods.hopper.parallelism_rule import ways
from hetctl.methods.hopper.simulate import Outage, VisitRecord
from hetctl.methods.hopper.unit_times import UnitTimes, lower_bound
from hetctl.methods.hopper.visits import Visit, by_start, visits_of
from hetctl.model.errors import BadInputError
from hetctl.model.plan import HOPPER
from hetctl.model.run_status import StepSpan
from hetctl.scheduling.planners.base import nearest

AUTO, RANDOMIZED, REPLAY = "auto", "randomized", "replay"
OutageRequest = tuple[str, float, float]
"""Worker, and from when to when it is not there, in seconds; the last may be infinite."""
MOST_TIMES = 50_000_000
"""Configurations times partitions times workers that fit memory."""
UNDONE = 1
"""Exit code that stands for a worker's failure."""


@dataclass(frozen=True)
class HopperRequest:
    """What is to be planned.

    Parameters
    ----------
    unit_times : Path
        File of unit times.
    plan_seconds : float
        How long a scheduler that searches may do so.
    mode : str
        ``hopper``, ``hybrid``, ``data-parallel``, or ``auto``: the cheapest that the rule of CEREBRO's
        appendix 12 leaves.
    efficiency : float
        Share of the ideal rate that workers reach which train together.
    """

    unit_times: Path
    scheduler: str = "best"
    plan_seconds: float = 0.8
    seed: int = 0
    mode: str = HOPPER
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        """Refuse an unknown scheduler before anything is read."""
        if self.scheduler not in SCHEDULERS:
            raise BadInputError(
                f"unknown scheduler {self.scheduler!r}", hint=nearest(self.scheduler, SCHEDULERS)
            )

    @property
    def search(self) -> SearchOptions:
        """Options of the scheduler."""
        return SearchOptions(seed=self.seed, seconds=self.plan_seconds)


@dataclass(frozen=True)
class HopperOutcome:
    """Hops, and how far they are from the limit.

    Parameters
    ----------
    scheduler : str
        Where the order comes from; ``replay``: from a log.
    units : UnitTimes
        What the hopper saw; its workers are groups where workers train together.
    stays : tuple of Stay
        In the order of their starts.
    lower_bound_s : float
        No schedule without preemption, on workers that never fail, has a smaller makespan.
    plan_seconds : float
        What the scheduler took.
    prices : mapping of str to float
        Planned makespan of an epoch by mode, of all that were looked at; none of a replay.
    """

    scheduler: str
    seed: int
    way: str
    units: UnitTimes
    stays: tuple[VisitRecord, ...]
    lower_bound_s: float
    plan_seconds: float
    prices: Mapping[str, float]
    epochs: int = 1

    @property
    def makespan_s(self) -> float:
        """When the last unit is done."""
        return max(stay.end_s for stay in self.stays if not stay.lost)

    @property
    def ratio(self) -> float:
        """The makespan over the bound; 1 is the limit."""
        return self.makespan_s / self.lower_bound_s if self.lower_bound_s else 1.0

    @property
    def lost_s(self) -> float:
        """Seconds of workers that failures undid."""
        return math.fsum(stay.end_s - stay.start_s for stay in self.stays if stay.lost)

    @property
    def busy(self) -> float:
        """Seconds of units that were done, over all workers' until the makespan."""
        done_s = math.fsum(stay.end_s - stay.start_s for stay in self.stays if not stay.lost)
        whole_s = len(self.units.workers) * self.makespan_s
        return done_s / whole_s if whole_s else 1.0

    @property
    def steps(self) -> tuple[StepSpan, ...]:
        """The stays as a chart of workers shows them."""
        return tuple(_step(stay) for stay in self.stays)


def plan_hops(request: HopperRequest) -> HopperOutcome:
    """Plan one epoch.

    Raises
    ------
    BadInputError
        If the file is wrong, or its partitions have copies and the scheduler or mode takes none.
    """
    chosen = _choose(request)
    schedule = chosen.way.schedule
    visits = visits_of(schedule, chosen.way.units)
    hops = sorted(schedule.hops, key=by_start)
    stays = [VisitRecord(visit, hop.start_s, hop.end_s) for visit, hop in zip(visits, hops, strict=True)]
    return chosen.outcome(request, stays)


def run_hops(request: HopperRequest, epochs: int = 1, away: Iterable[OutageRequest] = ()) -> HopperOutcome:
    """Plan, and run the hopper along the plan; with `randomized` it draws as it goes, as in CEREBRO.

    What is left is planned anew when workers fail, return or join late.

    Raises
    ------
    BadInputError
        As `plan_hops`; also if a worker that is away is unknown.
    InfeasibleError
        If a partition is lost for good before everybody has visited it.
    """
    chosen = _choose(request)
    units = chosen.way.units
    drawn = request.scheduler == RANDOMIZED
    course = simulate_hops(
        units,
        plan=() if drawn else visits_of(chosen.way.schedule, units, epochs),
        seed=request.seed,
        epochs=epochs,
        outages=_outages(away, chosen.groups),
        reschedule=None if drawn else request.search,
    )
    return chosen.outcome(request, course.stays, epochs)


def replay_hops(
    unit_times: Path,
    log: Path,
    *,
    epochs: int | None = None,
    seed: int = 0,
    away: Iterable[OutageRequest] = (),
) -> HopperOutcome:
    """Run the hopper along the visits that a log has as done, however long they take this time.

    Parameters
    ----------
    log : Path
        What `trace_of` returned.
    epochs : int or None
        Of every configuration; None: as many as the log has.
    seed : int
        Of what is drawn: visits that the log lacks, or has on a worker that is away.

    Raises
    ------
    BadInputError
        If a file is wrong, or a worker that is away is unknown.
    InfeasibleError
        If a partition is lost for good before everybody has visited it.
    """
    table = read_unit_times(unit_times)
    units = _units(unit_times, table)
    visits = read_visit_log(log, table)
    wanted = epochs or 1 + max(visit.epoch for visit in visits)
    plan = [Visit(i, one.config, one.epoch, one.partition, one.worker) for i, one in enumerate(visits)]
    outages = _outages(away, {worker: worker for worker in units.workers})
    course = simulate_hops(units, plan=plan, seed=seed, epochs=wanted, outages=outages)
    return HopperOutcome(
        scheduler=REPLAY,
        seed=seed,
        way=HOPPER,
        units=units,
        stays=course.stays,
        lower_bound_s=wanted * lower_bound(units),
        plan_seconds=0.0,
        prices={},
        epochs=wanted,
    )


def trace_of(outcome: HopperOutcome) -> str:
    """Return one line of JSON for each stay of a configuration at a worker."""
    return "".join(json.dumps(_traced(stay)) + "\n" for stay in outcome.stays)


def _traced(stay: VisitRecord) -> dict[str, Any]:
    return {
        "config": stay.visit.config,
        "worker": stay.visit.worker,
        "start": stay.start_s,
        "end": stay.end_s,
        "partition": stay.visit.partition,
        "epoch": stay.visit.epoch,
        "lost": stay.lost,
    }


def _step(stay: VisitRecord) -> StepSpan:
    return StepSpan(
        member=stay.visit.config,
        round=stay.visit.epoch,
        node=stay.visit.worker,
        gpus=(0,),
        start_s=stay.start_s,
        end_s=stay.end_s,
        exit_code=UNDONE if stay.lost else 0,
    )


@dataclass(frozen=True)
class _Chosen:
    """The cheapest way with its schedule, beside all that were looked at."""

    workers: tuple[str, ...]
    priced: Sequence[ModeCost]
    plan_seconds: float

    @property
    def way(self) -> ModeCost:
        return self.priced[0]

    @property
    def groups(self) -> Mapping[str, str]:
        """The group that cannot go on without a worker, by the worker's name."""
        names = self.way.units.workers
        return {self.workers[k]: names[g] for g, part in enumerate(self.way.groups) for k in part}

    def outcome(self, request: HopperRequest, stays: Iterable[VisitRecord], epochs: int = 1) -> HopperOutcome:
        return HopperOutcome(
            scheduler=request.scheduler,
            seed=request.seed,
            way=self.way.way,
            units=self.way.units,
            stays=tuple(stays),
            lower_bound_s=epochs * lower_bound(self.way.units),
            plan_seconds=self.plan_seconds,
            prices={one.way: one.schedule.makespan_s for one in self.priced},
            epochs=epochs,
        )


def _outages(away: Iterable[OutageRequest], groups: Mapping[str, str]) -> list[Outage]:
    outages = []
    for worker, start_s, end_s in away:
        if worker not in groups:
            raise BadInputError(f"there is no worker {worker!r} to be away", hint=nearest(worker, groups))
        outages.append(Outage(groups[worker], start_s, end_s))
    return outages


def _choose(request: HopperRequest) -> _Chosen:
    units = _units(request.unit_times, read_unit_times(request.unit_times))
    rule = ways(len(units.configs), len(units.workers))
    started = time.perf_counter()
    priced = price(
        units,
        rule if request.mode == AUTO else (request.mode,),
        efficiency=lambda size: request.efficiency if size > 1 else 1.0,
        schedule=lambda times: SCHEDULERS[request.scheduler](times, request.search),
    )
    return _Chosen(units.workers, priced, time.perf_counter() - started)


def _units(path: Path, table: UnitTimeTable) -> UnitTimes:
    shape = (len(table.configs), len(table.partitions), len(table.workers))
    if math.prod(shape) > MOST_TIMES:
        counts = "{:,} configurations, {:,} partitions and {:,} workers".format(*shape)
        raise BadInputError(f"{path}: {counts} have a product of more than {MOST_TIMES:,}")
    seconds = np.full(shape, np.inf)
    for place, value in table.seconds.items():
        seconds[place] = value
    return UnitTimes(table.configs, table.partitions, table.workers, seconds)
