from __future__ import annotations

from itertools import combinations

from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Options, Request
from hetctl.scheduling.planners.fixed import decide, drawn

NAMES = tuple(f"m{index}" for index in range(8))


def order(names: tuple[str, ...], gpus: int, seed: int = 0) -> list[str]:
    members = tuple(Workload(name, {1: 10.0, 2: 18.0}, 1.0) for name in names)
    options = Options(seed=seed)
    queue = sorted(members, key=lambda member: drawn(member, options))
    request = Request(queue, Cluster.of(gpus, 4).nodes, gpus, 0, options)
    return [allocation.member for allocation in decide(request).start]


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
    given = decide(Request(members, Cluster.of(12, 4).nodes, 12, 0, Options())).start
    assert [(a.gpus, a.rate) for a in given] == [(1, 10.0)] * 8
