from __future__ import annotations

import pytest

from hetctl.model.errors import InfeasibleError
from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners import PLANNERS
from hetctl.scheduling.planners.base import Decision, Options, Planner, Request
from hetctl.scheduling.simulate.scenario import Arrival, JobTiming, Scenario
from hetctl.scheduling.simulate.simulate_run import choose, simulate

SCENARIO = Scenario(Cluster.of(4, 4))
MEMBERS = [Workload(f"m{i}", {1: 10.0, 2: 18.0, 4: 30.0, 3: 25.0}, 100.0 * (i + 1)) for i in range(6)]
ARRIVALS = [Arrival(member) for member in MEMBERS]


def one_by_one(gpus: int) -> Planner:
    """A planner that trains one member at a time."""

    def decide(request: Request) -> Decision:
        first = request.workloads[0]
        placement = (Placement("node-0", tuple(range(gpus))),)
        return Decision((Allocation(first.name, gpus, DATA_PARALLEL, first.rates[gpus], placement),))

    return Planner(f"by-{gpus}", "global", decide)


def test_the_best_planner_is_chosen_and_all_figures_are_given() -> None:
    choice = choose(ARRIVALS, SCENARIO, Options(), [one_by_one(1), one_by_one(4), one_by_one(2)])
    assert choice.planner.name == "by-4"
    assert choice.reason == "simulated makespan of each planner: by-4 0:01:10, by-2 0:01:57, by-1 0:03:30"


def test_of_equals_the_first_is_chosen() -> None:
    first, second = one_by_one(4), one_by_one(4)
    assert choose(ARRIVALS, SCENARIO, Options(), [first, second]).planner is first


def test_none_of_all_planners_beats_the_choice() -> None:
    for objective in ("makespan", "mean-jct"):
        options = Options(objective=objective, solver_time_limit_s=0.2)
        best = simulate(choose(ARRIVALS, SCENARIO, options).planner, ARRIVALS, SCENARIO, options)
        for planner in PLANNERS.values():
            assert best.ratio <= simulate(planner, ARRIVALS, SCENARIO, options).ratio + 1e-9


def test_an_error_is_raised_if_no_planner_finds_a_plan() -> None:
    long = [Arrival(Workload("a", {1: 1.0}, 1000.0, 1000, startup_s=20.0))]
    with pytest.raises(InfeasibleError, match="shorter than start-up"):
        choose(long, Scenario(Cluster.of(1, 1), JobTiming(10.0)), Options())


@pytest.mark.parametrize("objective", ["makespan", "mean-jct"])
def test_a_member_that_follows_itself_is_one_job_in_the_bound(objective: str) -> None:
    def part(name: str, samples: float = 100.0) -> Workload:
        return Workload(name, {1: 10.0}, samples)

    more = [part("a", 200.0)]

    def after(name: str, _now_s: float, _gpu_s: float) -> list[Workload]:
        return [more.pop()] if name == "a" and more else []

    arrivals = [Arrival(part("a")), Arrival(part("b"))]
    done = simulate(one_by_one(1), arrivals, Scenario(Cluster.of(1, 1)), Options(objective=objective), after)
    bounds_s = {"makespan": 40.0, "mean-jct": (10.0 + 40.0) / 2}
    assert done.lower_bound_s == pytest.approx(bounds_s[objective])
    assert done.ratio > 0.999
