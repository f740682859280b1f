"""Outcome of a simulated run beside its lower bounds, and choice of the planner with the best one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from hetctl.model.errors import InfeasibleError
from hetctl.model.simulation import Interval, Simulation
from hetctl.model.values import dataclass
from hetctl.perf.bounds import makespan_bound, mean_jct_bound
from hetctl.scheduling.planners import PLANNERS
from hetctl.scheduling.planners.base import MEAN_JCT, Options, Planner
from hetctl.scheduling.simulate.engine import Engine, shared_gpu
from hetctl.scheduling.simulate.scenario import Arrival, Scenario, Successors, jobs_of
from hetctl.scheduling.simulate.simulated_task import SimulatedTask, forecasts


def simulate(
    planner: Planner,
    arrivals: Sequence[Arrival],
    scenario: Scenario,
    options: Options,
    successors: Successors | None = None,
) -> Simulation:
    """Simulate a planner on members as they arrive, until all have converged.

    Parameters
    ----------
    successors : callable or None
        Function that gives the members that follow a finished one. The bound holds for any order of theirs.

    Raises
    ------
    InfeasibleError
        If the cluster has no GPU, or a job is too short for start-up and a checkpoint of some member.
    """
    if scenario.cluster.gpus == 0:
        raise InfeasibleError("the cluster has no GPU", hint="raise --gpus")
    engine = Engine(planner, arrivals, scenario, options, successors=successors).run()
    arrivals = [*arrivals, *map(Arrival, engine.followed)]
    arrived_s = {arrival.workload.name: arrival.at_s for arrival in arrivals}
    members = forecasts(arrived_s, engine.tasks)
    makespan_s = max((member.done_s for member in members), default=0.0)
    waited_s = math.fsum(member.done_s - arrived_s[member.member] for member in members)
    mean_jct_s = waited_s / max(len(members), 1)
    jobs = jobs_of(arrivals)
    mean = options.objective == MEAN_JCT
    bound_s = (mean_jct_bound if mean else makespan_bound)(jobs, scenario.cluster.gpus)
    busy = math.fsum(map(_busy_s, engine.tasks))
    whole = scenario.cluster.gpus * makespan_s
    return Simulation(
        planner=planner.name,
        objective=options.objective,
        work="predicted" if scenario.work_estimator else "clairvoyant",
        sharing="lockstep" if scenario.lockstep else "independent",
        gpus=scenario.cluster.gpus,
        gpus_per_node=scenario.cluster.gpus_per_node,
        makespan_s=makespan_s,
        mean_jct_s=mean_jct_s,
        lower_bound_s=bound_s,
        ratio=(mean_jct_s if mean else makespan_s) / bound_s if bound_s else 1.0,
        rounds=len({task.round_index for task in engine.tasks}),
        restarts=len(engine.tasks) - len(members),
        gpu_busy_fraction=busy / whole if whole else 0.0,
        plan_seconds=math.fsum(engine.planning_s),
        slowest_plan_s=max(engine.planning_s, default=0.0),
        intervals=tuple(
            Interval(t.allocation, t.round_index, t.start_s, t.end_s, t.startup_s, t.samples)
            for t in engine.tasks
        ),
        members=members,
        options=asdict(options),
    )


def _busy_s(task: SimulatedTask) -> float:
    """Return the GPU-seconds of a task's training; in a seat those in which its device is busy with it."""
    if shared_gpu(task.allocation):
        return task.samples * task.workload.least_busy / task.workload.rates[1]
    return task.allocation.gpus * (task.end_s - task.start_s - task.startup_s)


COMPARISON_S = 0.5
"""Largest search time in seconds of a planner while it is compared with others."""


@dataclass(frozen=True)
class PlannerChoice:
    """A planner, and the reason of its choice; empty if the user named it."""

    planner: Planner
    reason: str = ""


def choose(
    arrivals: Sequence[Arrival],
    scenario: Scenario,
    options: Options,
    planners: Iterable[Planner] | None = None,
) -> PlannerChoice:
    """Simulate planners, by default all; return the best for the objective.

    Of equally good ones the one with the fewest restarts is best, then the first. Planners without a plan
    are left out.

    Raises
    ------
    InfeasibleError
        If no planner finds a plan.
    """
    limited = replace(options, solver_time_limit_s=min(options.solver_time_limit_s, COMPARISON_S))
    tried: list[tuple[float, int, Planner]] = []
    refusals: list[InfeasibleError] = []
    for planner in PLANNERS.values() if planners is None else planners:
        try:
            result = simulate(planner, arrivals, scenario, limited)
        except InfeasibleError as error:
            refusals.append(error)
        else:
            mean = options.objective == MEAN_JCT
            tried.append((result.mean_jct_s if mean else result.makespan_s, result.restarts, planner))
    if not tried:
        raise refusals[0]
    # Without the key, equal results would compare planners, which have no order.
    ranked = sorted(tried, key=lambda entry: entry[:2])
    figures = ", ".join(f"{planner.name} {_time(seconds)}" for seconds, _, planner in ranked)
    return PlannerChoice(ranked[0][2], f"simulated {options.objective} of each planner: {figures}")


def _time(seconds: float) -> str:
    """Return a time as ``h:mm:ss``, or with tenths of a second below a minute."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
