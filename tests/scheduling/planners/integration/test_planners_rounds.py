"""`homogeneous` and `flotilla-local`: rounds that end together, and refills at once."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Options, Request
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate


def simulated(planner: str, members: list[Workload], gpus: int = 4, seed: int = 0) -> Simulation:
    arrivals = [Arrival(member) for member in members]
    return simulate(planner_named(planner), arrivals, Scenario(Cluster.of(gpus, 4)), Options(seed=seed))


def unlike(count: int) -> list[Workload]:
    rates = {gpus: 10.0 * gpus**0.9 for gpus in range(1, 5)}
    return [Workload(f"m{i:02}", rates, 100.0 * (1 + i), 50) for i in range(count)]


def test_a_homogeneous_set_begins_when_the_one_before_is_done() -> None:
    result = simulated("homogeneous", unlike(10))
    rounds = [[i for i in result.intervals if i.round_index == index] for index in range(result.rounds)]
    assert [len(intervals) for intervals in rounds] == [4, 4, 2]
    assert all(interval.gpus == 1 for interval in result.intervals)
    for before, following in pairwise(rounds):
        assert {interval.start_s for interval in following} == {max(i.end_s for i in before)}
    assert result.restarts == 0


def test_homogeneous_sets_are_drawn_by_the_seed() -> None:
    firsts = {
        frozenset(i.member for i in simulated("homogeneous", unlike(10), seed=seed).intervals[:4])
        for seed in range(8)
    }
    assert len(firsts) > 4


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


@pytest.mark.parametrize("planner", ["homogeneous", "flotilla-local"])
def test_everybody_has_a_reason(planner: str) -> None:
    members = tuple(unlike(6))
    request = Request(members, Cluster.of(4, 4).nodes, 4, 0, Options())
    chosen = planner_named(planner)
    words = chosen.reasons(request, chosen.decide(request))
    assert set(words) == {member.name for member in members}
