"""Choice of the planner with the best simulated result on the given profiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hetctl.model.errors import InfeasibleError
from hetctl.model.simulation import Simulation
from hetctl.scheduling.planners import PLANNERS
from hetctl.scheduling.planners.base import MEAN_JCT, Options, Planner
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

TRIAL_S = 0.5
"""Largest search time in seconds of a planner while it is compared with others."""


@dataclass(frozen=True)
class PlannerChoice:
    """A planner, and the reason of its choice; `why` is empty if the user named it."""

    planner: Planner
    why: str = ""


def choose(
    arrivals: Sequence[Arrival],
    scenario: Scenario,
    options: Options,
    planners: Iterable[Planner] | None = None,
) -> PlannerChoice:
    """Simulate planners, by default all; return the best for the objective.

    Among equally good ones it is that with the fewest restarts, then the first. Planners without a plan
    are left out.

    Raises
    ------
    InfeasibleError
        If no planner finds a plan.
    """
    trial = replace(options, plan_seconds=min(options.plan_seconds, TRIAL_S))
    tried: list[tuple[float, int, Planner]] = []
    refusals: list[InfeasibleError] = []
    for planner in PLANNERS.values() if planners is None else planners:
        try:
            result = simulate(planner, arrivals, scenario, trial)
        except InfeasibleError as error:
            refusals.append(error)
        else:
            tried.append((_objective(result), result.restarts, planner))
    if not tried:
        raise refusals[0]
    # Without the key, equal results would compare planners, which have no order.
    ranked = sorted(tried, key=lambda entry: entry[:2])
    figures = ", ".join(f"{planner.name} {_time(seconds)}" for seconds, _, planner in ranked)
    return PlannerChoice(ranked[0][2], f"simulated {options.objective} of each planner: {figures}")


def _objective(result: Simulation) -> float:
    return result.mean_jct_s if result.objective == MEAN_JCT else result.makespan_s


def _time(seconds: float) -> str:
    """Return a time as ``h:mm:ss``, or with tenths of a second below a minute."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
