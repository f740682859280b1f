from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster, Node
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Options, Request, RunningMember
from hetctl.scheduling.planners.doubling import DOUBLING
from hetctl.scheduling.planners.exploratory import EXPLORATORY, STAGE_S
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

CURVE = {gpus: 100.0 * gpus**0.9 for gpus in range(1, 17)}


class Watched(Mapping[int, float]):
    """A rate curve that notes which numbers of GPUs are looked at."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __getitem__(self, gpus: int) -> float:
        self.seen.add(gpus)
        return CURVE[gpus]

    def __iter__(self):
        return iter(CURVE)

    def __len__(self) -> int:
        return len(CURVE)


def member(name: str, family: str = "f", samples: float = 1e6) -> Workload:
    return Workload(name, CURVE, samples, restart_s=10.0, family=family)


def simulated(exploration: str, members: list[Workload], gpus: int = 16, gap_s: float = 0.0) -> Simulation:
    arrivals = [Arrival(member, gap_s * i) for i, member in enumerate(members)]
    options = Options(exploration=exploration)
    return simulate(EXPLORATORY, arrivals, Scenario(Cluster.of(gpus, 8)), options)


def held_by(result: Simulation, name: str) -> list[tuple[int, float]]:
    return [(i.gpus, i.end_s - i.start_s) for i in result.intervals if i.member == name]


@pytest.mark.parametrize("exploration", ["each", "shared"])
def test_a_new_member_trains_150_s_on_each_number_of_gpus(exploration: str) -> None:
    stages = held_by(simulated(exploration, [member("a")]), "a")[:4]
    assert [gpus for gpus, _ in stages] == [1, 2, 4, 8]
    assert [seconds for _, seconds in stages[:3]] == pytest.approx([STAGE_S] * 3)


def test_with_each_a_member_keeps_eight_gpus_while_it_explores() -> None:
    result = simulated("each", [member("a"), member("b"), member("c")])
    for name in "abc":
        assert [gpus for gpus, _ in held_by(result, name)[:4]] == [1, 2, 4, 8]
    starts = {i.member: i.start_s for i in reversed(result.intervals)}
    assert starts["a"] == starts["b"] == 0.0
    assert starts["c"] == pytest.approx(4 * STAGE_S)


def test_with_shared_a_family_explores_once_while_others_train() -> None:
    result = simulated("shared", [member("a"), member("b")], gap_s=4 * STAGE_S)
    assert [gpus for gpus, _ in held_by(result, "a")[:4]] == [1, 2, 4, 8]
    assert held_by(result, "b")[0][0] == 8
    together = simulated("shared", [member("a"), member("b")])
    assert held_by(together, "b")[0] == (1, pytest.approx(2 * STAGE_S))
    alone = simulated("shared", [member("a", ""), member("b", "")])
    assert [gpus for gpus, _ in held_by(alone, "b")[:4]] == [1, 2, 4, 8]


def test_with_shared_no_member_waits_for_an_explorer() -> None:
    result = simulated("shared", [member(f"m{i}", family="") for i in range(16)])
    first = [i for i in result.intervals if i.start_s == 0.0]
    assert [i.gpus for i in first] == [1] * 16


def test_only_rates_that_were_explored_are_looked_at() -> None:
    watched = Watched()
    decision = EXPLORATORY.decide(asked((Workload("a", watched, 1e6),)))
    assert [allocation.gpus for allocation in decision.start] == [1]
    assert watched.seen == {1}
    assert decision.replan_at_s == STAGE_S


def asked(workloads: tuple[Workload, ...]) -> Request:
    return Request(workloads, Cluster.of(16, 8).nodes, 16, 0, Options())


def test_reasons_name_the_members_that_explore() -> None:
    request = asked((member("a"), member("b")))
    words = EXPLORATORY.reasons(request, EXPLORATORY.decide(request))
    assert words["a"] == "explores its rate on 1 GPU"
    assert words["b"] == "1 GPU: no rate on 2 is known"


def test_sharing_what_is_known_comes_close_to_knowing_it_before() -> None:
    members = [member(f"m{i}", samples=3e5) for i in range(30)]
    arrivals = [Arrival(m, 100.0 * i) for i, m in enumerate(members)]
    scenario = Scenario(Cluster.of(16, 8))
    before = simulate(DOUBLING, arrivals, scenario, Options()).mean_jct_s
    shared = simulate(EXPLORATORY, arrivals, scenario, Options()).mean_jct_s
    each = simulate(EXPLORATORY, arrivals, scenario, Options(exploration="each")).mean_jct_s
    assert shared <= 1.15 * before
    assert each > 1.1 * shared


def test_an_explorer_keeps_its_stage_while_others_wait() -> None:
    """Six members that share nothing: two at a time have two GPUs, each until that rate is known."""
    members = [replace(member(f"m{i}", family="", samples=3e5), checkpoint_s=1.0) for i in range(6)]
    result = simulated("shared", members, gpus=8)
    pairs = [i for i in result.intervals if i.gpus == 2 and i.start_s < 4 * STAGE_S]
    assert len(pairs) >= 6
    assert all(i.end_s - i.start_s >= STAGE_S for i in pairs)


def test_a_stage_has_no_more_nodes_than_it_needs() -> None:
    nodes = (Node("n0", (0, 1, 2)), Node("n1", (0, 1, 2, 3, 4)))
    large = Workload("large", dict.fromkeys(range(4, 9), 1.0), 1.0)
    given = Allocation(
        "large", 8, DATA_PARALLEL, 1.0, tuple(Placement(node.name, node.gpus) for node in nodes)
    )
    options = Options(exploration="each")
    held = (RunningMember(large, given, 0.0),)
    request = Request((), (), 8, 0, options, held=held, cluster=nodes, now_s=900.0)
    (stage,) = EXPLORATORY.decide(request).start
    assert (stage.gpus, stage.placement) == (4, (Placement("n1", (0, 1, 2, 3)),))
