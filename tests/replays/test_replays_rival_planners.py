"""Homogeneous training of FLEET's comparison: sets that end together."""

from __future__ import annotations

from itertools import pairwise

from replays.rival_planners import HOMOGENEOUS

from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Options
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate


def simulated(seed: int = 0) -> Simulation:
    """Simulate ten members of different lengths on four GPUs."""
    arrivals = [Arrival(Workload(f"m{i:02}", {1: 10.0, 2: 19.0}, 100.0 * (1 + i), 50)) for i in range(10)]
    return simulate(HOMOGENEOUS, arrivals, Scenario(Cluster.of(4, 4)), Options(seed=seed))


def test_a_homogeneous_set_begins_when_the_one_before_is_done() -> None:
    result = simulated()
    rounds = [[i for i in result.intervals if i.round_index == index] for index in range(result.rounds)]
    assert [len(intervals) for intervals in rounds] == [4, 4, 2]
    assert all(interval.gpus == 1 for interval in result.intervals)
    for before, following in pairwise(rounds):
        assert {interval.start_s for interval in following} == {max(i.end_s for i in before)}
    assert result.restarts == 0


def test_homogeneous_sets_are_drawn_by_the_seed() -> None:
    firsts = {frozenset(i.member for i in simulated(seed).intervals[:4]) for seed in range(8)}
    assert len(firsts) > 4
