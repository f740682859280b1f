"""Forecast of a plan: its rounds, simulated until every member has converged."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict

from hetctl.model.errors import InfeasibleError
from hetctl.model.plan import Forecast, Plan, Round
from hetctl.model.workload import Workload
from hetctl.perf.bounds import fluid_bound
from hetctl.scheduling.planners.base import Decision, Options, Planner, Request
from hetctl.scheduling.simulate.engine import Engine
from hetctl.scheduling.simulate.explain import reasons_for
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulated_step import SimulatedStep


def forecast(
    planner: Planner,
    workloads: Sequence[Workload],
    world: Scenario,
    options: Options,
    *,
    explain: bool = False,
) -> Plan:
    """Predict every round until all workloads have converged, and the time that they take.

    A member converges when its samples are done. In the global paradigm a round ends when all of its
    steps have ended; in the others rounds overlap, one for each time that GPUs were allocated.

    Parameters
    ----------
    explain : bool
        True to fill the rounds' `reasons`.

    Raises
    ------
    InfeasibleError
        If the cluster has no GPU, or a job is too short for an epoch of some member.
    """
    cluster = world.cluster
    if cluster.gpus == 0:
        raise InfeasibleError("the cluster has no GPU", hint="raise --gpus")
    reasons: dict[int, dict[str, str]] = {}

    def note(request: Request, decision: Decision) -> None:
        reasons[request.round_index] = reasons_for(planner, request, decision)

    arrivals = [Arrival(workload) for workload in workloads]
    steps = Engine(planner, arrivals, world, options, note if explain else None).run().steps
    makespan_s = max((step.end_s for step in steps), default=0.0)
    lower_bound_s = fluid_bound(workloads, cluster.gpus)
    return Plan(
        planner=planner.name,
        objective=options.objective,
        gpus=cluster.gpus,
        gpus_per_node=cluster.gpus_per_node,
        predicted_makespan_s=makespan_s,
        lower_bound_s=lower_bound_s,
        ratio=makespan_s / lower_bound_s if lower_bound_s else 1.0,
        rounds=_rounds(steps, reasons),
        members=_members(workloads, steps),
        options=asdict(options),
    )


def _rounds(steps: Sequence[SimulatedStep], reasons: dict[int, dict[str, str]]) -> tuple[Round, ...]:
    by_round: dict[int, list[SimulatedStep]] = defaultdict(list)
    for step in steps:
        by_round[step.round_index].append(step)
    # A member that waits for GPUs to become free starts in a later round than the decision's.
    decided = sorted(reasons)
    return tuple(
        Round(
            index=index,
            predicted_s=max(step.end_s for step in those) - those[0].start_s,
            allocations=tuple(step.allocation for step in those),
            start_s=those[0].start_s,
            reasons=reasons[decided[bisect_right(decided, index) - 1]] if decided else {},
        )
        for index, those in by_round.items()
    )


def _members(workloads: Sequence[Workload], steps: Sequence[SimulatedStep]) -> tuple[Forecast, ...]:
    done_s: dict[str, float] = {}
    training_s: dict[str, float] = defaultdict(float)
    for step in steps:
        done_s[step.workload.name] = step.end_s
        training_s[step.workload.name] += step.end_s - step.start_s
    return tuple(Forecast(c.name, done_s[c.name], training_s[c.name]) for c in workloads)
