"""`flotilla-local`: refills at once."""

from __future__ import annotations

from replays.rival_planners import planner_named

from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Options, Request
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate


def simulated(planner: str, members: list[Workload], gpus: int = 4, seed: int = 0) -> Simulation:
    arrivals = [Arrival(member) for member in members]
    return simulate(planner_named(planner), arrivals, Scenario(Cluster.of(gpus, 4)), Options(seed=seed))


def unlike(count: int) -> list[Workload]:
    rates = {gpus: 10.0 * gpus**0.9 for gpus in range(1, 5)}
    return [Workload(f"m{i:02}", rates, 100.0 * (1 + i), 50) for i in range(count)]


def test_local_flotillas_refill_freed_gpus_and_stop_no_member() -> None:
    result = simulated("flotilla-local", unlike(10))
    assert result.restarts == 0
    busy = sorted((i.end_s, i.gpus) for i in result.intervals)
    starts = sorted(i.start_s for i in result.intervals)
    assert set(starts) - {0.0} <= {end_s for end_s, _ in busy}
    assert result.gpu_busy_fraction > simulated("homogeneous", unlike(10)).gpu_busy_fraction


def test_freed_gpus_take_the_fastest_member_left_and_near_ones() -> None:
    members = [Workload("first", {1: 100.0}, 100.0), Workload("slow", {1: 20.0, 2: 36.0}, 1000.0)]
    members += [Workload("fast", {1: 90.0}, 900.0), Workload("near", {1: 88.0}, 880.0)]
    result = simulated("flotilla-local", members, gpus=1)
    assert [interval.member for interval in result.intervals] == ["first", "fast", "near", "slow"]


def test_everybody_has_a_reason() -> None:
    members = tuple(unlike(6))
    request = Request(members, Cluster.of(4, 4).nodes, 4, 0, Options())
    chosen = planner_named("flotilla-local")
    words = chosen.reasons(request, chosen.decide(request))
    assert set(words) == {member.name for member in members}
