"""The doubling heuristic against the exact optimum of its objective, and how it resizes."""

from __future__ import annotations

import statistics

import pytest
from doubling_exact import CURVES, GPUS, Curve, exact_s, instance, sublinear, total_s

from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.site import Cluster, Node
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Decision, Options, Request, RunningMember
from hetctl.scheduling.planners.doubling import DOUBLING, allot, double

BAR = 1.005


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("gpus", GPUS)
def test_the_total_time_is_the_least(curve: Curve, gpus: int) -> None:
    ratios = []
    for seed in range(12):
        jobs = instance(curve, gpus, seed)
        counts = double(jobs, Cluster.of(gpus, 1).nodes)
        assert sum(counts.values()) <= gpus
        assert all(count & (count - 1) == 0 for count in counts.values())
        ratios.append(total_s(jobs, counts) / exact_s(jobs, gpus))
    assert min(ratios) > 1 - 1e-9
    assert max(ratios) <= BAR
    assert statistics.median(ratios) < 1 + 1e-9


def test_exchanges_improve_on_the_papers_greedy_choice() -> None:
    nodes = Cluster.of(16, 1).nodes
    greedy, found = [], []
    for seed in range(60):
        jobs = instance(sublinear, 16, seed)
        best_s = exact_s(jobs, 16)
        greedy.append(total_s(jobs, allot(jobs, nodes)) / best_s)
        found.append(total_s(jobs, double(jobs, nodes)) / best_s)
    assert max(greedy) > BAR >= max(found)


def member(name: str, samples: float = 1e6, restart_s: float = 10.0, **of: float) -> Workload:
    rates = {gpus: 100.0 * gpus ** of.get("exponent", 0.9) for gpus in range(1, 9)}
    return Workload(name, rates, samples, restart_s=restart_s)


def held(workload: Workload, node: str, *gpus: int, fixed: bool = False) -> RunningMember:
    rate = workload.rates[len(gpus)]
    allocation = Allocation(workload.name, len(gpus), DATA_PARALLEL, rate, (Placement(node, gpus),))
    return RunningMember(workload, allocation, 0.0, fixed)


def given(decided: Decision) -> dict[str, int]:
    return {a.member: a.gpus for a in decided.start}


def asked(waiting: tuple[Workload, ...], training: tuple[RunningMember, ...] = (), gpus: int = 8) -> Request:
    taken = {(p.node, gpu) for h in training for p in h.allocation.placement for gpu in p.gpus}
    cluster = Cluster.of(gpus, 8)
    nodes = (Node(n.name, tuple(g for g in n.gpus if (n.name, g) not in taken)) for n in cluster.nodes)
    free = tuple(node for node in nodes if node.gpus)
    return Request(waiting, free, gpus, 0, Options(), training, cluster.nodes)


def test_each_gets_a_worker_and_then_the_longest_is_doubled() -> None:
    few = (member("short", 1e5), member("long", 1e7), member("middle", 1e6))
    assert given(DOUBLING.decide(asked(few))) == {"long": 4, "middle": 2, "short": 2}


def test_more_members_than_gpus_are_served_first_come_first() -> None:
    many = tuple(member(f"m{i}") for i in range(6))
    assert given(DOUBLING.decide(asked(many, gpus=4))) == {f"m{i}": 1 for i in range(4)}


def test_a_new_member_gets_gpus_of_the_one_that_loses_least() -> None:
    training = (held(member("long"), "node-0", 0, 1, 2, 3), held(member("short", 3e5), "node-0", 4, 5, 6, 7))
    decision = DOUBLING.decide(asked((member("new"),), training))
    assert given(decision) == {"short": 2, "new": 2}
    assert decision.stop == ()


def test_freed_gpus_resize_members_only_if_a_restart_pays() -> None:
    training = (held(member("a"), "node-0", 0, 1, 2, 3),)
    assert given(DOUBLING.decide(asked((), training))) == {"a": 8}
    nearly_done = (held(member("a", 1000.0), "node-0", 0, 1, 2, 3),)
    assert given(DOUBLING.decide(asked((), nearly_done))) == {}


def test_fixed_members_stay_as_they_are() -> None:
    training = (held(member("a"), "node-0", 0, 1, 2, 3, fixed=True), held(member("b"), "node-0", 4))
    assert given(DOUBLING.decide(asked((member("c"),), training))) == {"b": 2, "c": 2}
    assert given(DOUBLING.decide(asked((), training[:1]))) == {}


def test_a_member_grows_where_one_more_gpu_gains_nothing() -> None:
    rates = {gpus: 100.0 * (1 << gpus.bit_length() - 1) ** 0.9 for gpus in range(1, 9)}
    assert given(DOUBLING.decide(asked((Workload("a", rates, 1e6),)))) == {"a": 8}


def test_reasons_give_the_gain_and_who_waits() -> None:
    request = asked(tuple(member(f"m{i}") for i in range(6)), gpus=4)
    words = DOUBLING.reasons(request, DOUBLING.decide(request))
    assert words["m0"].startswith("1 GPU: 2 would save 4.64e+03 s for each GPU more")
    assert words["m5"] == "waits, 1 before it: 4 members have a GPU each or more"
