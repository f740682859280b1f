from __future__ import annotations

from itertools import combinations

import pytest

from hetctl.model.errors import BadInputError
from hetctl.model.site import Cluster, Node
from hetctl.model.workload import Workload
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Options, Planner, Request
from hetctl.scheduling.planners.fixed import INDEPENDENT, drawn, fixed
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

CLUSTER = Cluster.of(16, 8)


def member(name: str, most: int = 8, samples: float = 800.0) -> Workload:
    return Workload(name, {gpus: 10.0 * gpus for gpus in range(1, most + 1)}, samples)


def asked(planner: Planner, *members: Workload, free: tuple[Node, ...] = CLUSTER.nodes) -> dict[str, int]:
    decision = planner.decide(Request(members, free, 16, 0, Options(), cluster=CLUSTER.nodes))
    return {allocation.member: allocation.gpus for allocation in decision.start}


def test_every_member_asks_for_k_or_for_as_many_as_it_can_use() -> None:
    assert asked(fixed(4), member("a"), member("b", most=3), member("c")) == {"a": 4, "b": 3, "c": 4}
    assert asked(fixed(64), member("a", most=64)) == {"a": 16}


def test_no_member_overtakes_the_first_in_the_queue() -> None:
    some = (Node("node-0", (0, 1, 2)), Node("node-1", (0,)))
    assert asked(fixed(4), member("a"), member("b", most=1), free=some) == {}
    assert asked(fixed(3), member("a"), member("b"), member("c", most=1), free=some) == {"a": 3}


def test_members_are_done_in_waves() -> None:
    jobs = [Arrival(member(f"m{i}")) for i in range(5)]
    result = simulate(fixed(8), jobs, Scenario(CLUSTER), Options())
    assert [done.done_s for done in result.members] == pytest.approx([10, 10, 20, 20, 30])
    assert result.restarts == 0


def test_k_is_part_of_the_name() -> None:
    assert planner_named("fixed-8").name == "fixed-8"
    assert asked(planner_named("fixed-2"), member("a")) == {"a": 2}


@pytest.mark.parametrize("name", ["fixed-0", "fixed-x", "fixed-", "fixed", "fixed--1", "fixed-1.5"])
def test_a_name_without_k_is_refused(name: str) -> None:
    with pytest.raises(BadInputError, match=f"'{name}' lacks the number of GPUs") as caught:
        planner_named(name)
    assert caught.value.hint == "for example fixed-4"


def test_reasons_name_the_gpus_that_a_member_waits_for() -> None:
    free = (Node("node-0", (0, 1, 2)),)
    request = Request(
        (member("a", most=2), member("b"), member("c")), free, 16, 0, Options(), cluster=CLUSTER.nodes
    )
    assert fixed(4).reasons(request, fixed(4).decide(request)) == {
        "a": "2 GPUs and not 4: it can use no more here",
        "b": "waits for 4 GPUs on as few nodes as that takes; 1 free",
        "c": "waits: b came first",
    }


NAMES = tuple(f"m{index}" for index in range(8))


def order(names: tuple[str, ...], gpus: int, seed: int = 0) -> list[str]:
    members = tuple(Workload(name, {1: 10.0, 2: 18.0}, 1.0) for name in names)
    options = Options(seed=seed)
    queue = sorted(members, key=lambda member: drawn(member, options))
    request = Request(queue, Cluster.of(gpus, 4).nodes, gpus, 0, options)
    return [allocation.member for allocation in INDEPENDENT.decide(request).start]


def test_the_order_is_the_seeds_and_not_the_ensembles() -> None:
    assert order(NAMES, 8) == order(NAMES[::-1], 8)
    assert sorted(order(NAMES, 8)) == list(NAMES)
    assert len({tuple(order(NAMES, 8, seed)) for seed in range(20)}) > 15


def test_refills_and_restarts_continue_in_the_same_order() -> None:
    whole = order(NAMES, 8)
    assert order(NAMES, 3) == whole[:3]
    for some in combinations(NAMES, 5):
        assert order(some, 8) == [name for name in whole if name in some]


def test_everybody_gets_one_gpu() -> None:
    members = tuple(Workload(name, {1: 10.0, 2: 18.0}, 1.0) for name in NAMES)
    given = INDEPENDENT.decide(Request(members, Cluster.of(12, 4).nodes, 12, 0, Options())).start
    assert [(a.gpus, a.rate) for a in given] == [(1, 10.0)] * 8
