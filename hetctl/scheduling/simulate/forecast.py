"""Forecast of a plan: its rounds, simulated until every member has converged, and reasons for them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from hetctl.model.errors import InfeasibleError
from hetctl.model.plan import Allocation, Plan, Round
from hetctl.model.workload import Workload
from hetctl.perf.bounds import fluid_bound
from hetctl.perf.rate_extrapolation import gpu_count
from hetctl.scheduling.planners.base import Decision, Options, Planner, Request, allocations_after, single_s
from hetctl.scheduling.simulate.engine import Engine
from hetctl.scheduling.simulate.scenario import Arrival, Scenario, Successors, jobs_of
from hetctl.scheduling.simulate.simulated_task import SimulatedTask, forecasts

MOST_NAMED = 3


def forecast(
    planner: Planner,
    workloads: Sequence[Workload],
    scenario: Scenario,
    options: Options,
    *,
    explain: bool = False,
    successors: Successors | None = None,
) -> Plan:
    """Predict every round until all workloads have converged, and the time that they take.

    A member converges when its samples are done. In the global paradigm a round ends when all of its
    tasks have ended. In the others rounds overlap: each allocation of GPUs begins one.

    Parameters
    ----------
    explain : bool
        True to fill the rounds' `reasons`.
    successors : callable or None
        Same as in `simulate`.

    Raises
    ------
    InfeasibleError
        If the cluster has no GPU, or a job is too short for start-up and a checkpoint of some member.
    """
    cluster = scenario.cluster
    if cluster.gpus == 0:
        raise InfeasibleError("the cluster has no GPU", hint="raise --gpus")
    reasons: dict[int, dict[str, str]] = {}

    def note(request: Request, decision: Decision) -> None:
        reasons[request.round_index] = reasons_for(planner, request, decision)

    arrivals = [*map(Arrival, workloads)]
    engine = Engine(planner, arrivals, scenario, options, note if explain else None, successors).run()
    whole = [workload for _, workload in jobs_of([*arrivals, *map(Arrival, engine.followed)])]
    tasks = engine.tasks
    makespan_s = max((task.end_s for task in tasks), default=0.0)
    lower_bound_s = scenario.timing.job_start_s + fluid_bound(whole, cluster.gpus)
    return Plan(
        planner=planner.name,
        objective=options.objective,
        gpus=cluster.gpus,
        gpus_per_node=cluster.gpus_per_node,
        predicted_makespan_s=makespan_s,
        lower_bound_s=lower_bound_s,
        ratio=makespan_s / lower_bound_s if lower_bound_s else 1.0,
        rounds=_rounds(tasks, reasons),
        members=forecasts((workload.name for workload in whole), tasks),
        options=asdict(options),
    )


def _rounds(tasks: Sequence[SimulatedTask], reasons: dict[int, dict[str, str]]) -> tuple[Round, ...]:
    by_round: dict[int, list[SimulatedTask]] = defaultdict(list)
    for task in tasks:
        by_round[task.round_index].append(task)
    # A member that waits for GPUs to become free starts in a later round than the decision's.
    decided = sorted(reasons)
    return tuple(
        Round(
            index=index,
            predicted_s=max(task.end_s for task in those) - those[0].start_s,
            allocations=tuple(task.allocation for task in those),
            start_s=those[0].start_s,
            reasons=reasons[decided[bisect_right(decided, index) - 1]] if decided else {},
        )
        for index, those in by_round.items()
    )


def reasons_for(planner: Planner, request: Request, decision: Decision) -> dict[str, str]:
    """Return a reason by member: first those that start or continue, then those that wait.

    If the planner gives none, the reason is the member's share of GPUs and work. Members with GPUs get
    notes, too, such as rates that were not measured.
    """
    known = {c.name: c for c in (*request.workloads, *(held.workload for held in request.held))}
    given = allocations_after(request, decision)
    whole_s = math.fsum(single_s(workload) for workload in known.values())
    waiting = _waiting_reason(request, given)
    reasons = {
        **{name: _reason(known[name], allocation, whole_s) for name, allocation in given.items()},
        **{name: f"waits: {waiting}" for name in known if name not in given},
        **{name: f"stops: {waiting}" for name in decision.stop if name not in given},
        **planner.reasons(request, decision),
    }
    return {
        name: "; ".join((reason, *(known[name].notes if name in given else ())))
        for name, reason in reasons.items()
    }


def _reason(workload: Workload, allocation: Allocation, whole_s: float) -> str:
    efficiency = allocation.rate / (allocation.gpus * workload.gpu_rate)
    share = single_s(workload) / whole_s if whole_s else 0.0
    return (
        f"{gpu_count(allocation.gpus)} for {share:.0%} of the work:"
        f" {allocation.rate:.4g} samples/s, {efficiency:.0%} of linear scaling"
    )


def _waiting_reason(request: Request, given: Mapping[str, Allocation]) -> str:
    """Return which members have the GPUs; a local planner's request does not name those in training."""
    known = sum(held.allocation.gpus for held in request.held)
    others = request.gpus - request.free_gpus - known
    idle = request.gpus - others - sum(allocation.gpus for allocation in given.values())
    largest = sorted(given, key=lambda name: -given[name].gpus)
    holders = [f"{name} ({given[name].gpus})" for name in largest[:MOST_NAMED]]
    more = len(given) - len(holders)
    holders += [f"{more} more"] if more else []
    holders += [f"those that train on ({others})"] if others else []
    if not holders:
        return f"all {request.gpus} GPUs stay idle"
    taken = f"taken by {', '.join(holders)}"
    return (
        f"{idle} of {request.gpus} GPUs stay idle, the rest is {taken}" if idle else f"all GPUs are {taken}"
    )
