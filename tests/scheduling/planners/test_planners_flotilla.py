from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.plan import Allocation
from hetctl.model.site import Cluster, Node
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Options, Request
from hetctl.scheduling.planners.flotilla import create_flotilla, decide, share_leftover


def allocations(request: Request) -> tuple[Allocation, ...]:
    return decide(request).start


def linear(name: str, rate: float, max_gpus: int = 16) -> Workload:
    return Workload(name, {gpus: gpus * rate for gpus in range(1, max_gpus + 1)}, 1000.0)


def request(workloads: tuple[Workload, ...], gpus: int, per_node: int = 4, **options: float) -> Request:
    return Request(workloads, Cluster.of(gpus, per_node).nodes, gpus, 0, Options(**options))  # type: ignore[arg-type]


def test_equation_3_by_hand() -> None:
    # The reference is 100. At delta 20: b reaches 90 on 3 GPUs, c 100 on 2; d's 60 and 120 are off by
    # 40 and 20, so 2 GPUs; e's 70 and 140 are both too far.
    members = (linear("a", 100), linear("b", 30), linear("c", 50), linear("d", 60), linear("e", 70))
    counts = create_flotilla(members, 100, Options(delta=20))
    assert counts == {"a": 1, "c": 2, "b": 3, "d": 2}
    assert list(counts) == ["a", "c", "b", "d"]


def test_members_join_nearest_first_while_gpus_last() -> None:
    members = (linear("a", 100), linear("b", 30), linear("c", 50), linear("d", 60))
    assert create_flotilla(members, 5, Options(delta=20)) == {"a": 1, "c": 2, "d": 2}
    assert create_flotilla(members, 2, Options(delta=20)) == {"a": 1}


def test_with_few_gpus_left_a_member_takes_its_second_best_count() -> None:
    # b would best have 3 GPUs (102), but with 2 left it may still join on 2 (85).
    members = (linear("a", 100), Workload("b", {1: 50.0, 2: 85.0, 3: 102.0}, 1.0))
    assert create_flotilla(members, 4, Options(delta=20)) == {"a": 1, "b": 3}
    assert create_flotilla(members, 3, Options(delta=20)) == {"a": 1, "b": 2}


def test_delta_is_relative_unless_given() -> None:
    members = (linear("a", 1.0), linear("b", 0.9), linear("c", 0.7, max_gpus=1))
    assert create_flotilla(members, 8, Options()) == {"a": 1, "b": 1}
    assert create_flotilla(members, 8, Options(delta=0.31)) == {"a": 1, "b": 1, "c": 1}


def test_leftover_goes_to_the_slowest_one_by_one() -> None:
    members = (linear("a", 100), linear("b", 90))
    counts = {"a": 1, "b": 1}
    share_leftover(members, counts, 5)
    # 90 < 100: b has 2; then a has 2; then 180 < 200: b has 3.
    assert counts == {"a": 2, "b": 3}


def test_leftover_passes_by_members_that_gain_nothing() -> None:
    flat = Workload("flat", {1: 50.0, 2: 50.0, 3: 80.0}, 1.0)
    members = (flat, linear("full", 60, max_gpus=1), linear("more", 90, max_gpus=3))
    counts = {"flat": 1, "full": 1, "more": 1}
    share_leftover(members, counts, 12)
    assert counts == {"flat": 1, "full": 1, "more": 3}


def test_a_member_without_room_gets_fewer_gpus() -> None:
    members = tuple(linear(name, 25.0, max_gpus=4) for name in "abc")
    nodes = (Node("n0", tuple(range(6))), Node("n1", tuple(range(6))))
    given = allocations(Request(members, nodes, 12, 0, Options()))
    assert [allocation.gpus for allocation in given] == [4, 4, 2]
    assert [allocation.rate for allocation in given] == [100.0, 100.0, 50.0]
    assert all(len(allocation.placement) == 1 for allocation in given)


def test_gpus_that_a_member_had_to_leave_go_to_others() -> None:
    # 3, 3 and 2 GPUs do not fit on two nodes of 4 without straddling; c's second one is of use to a.
    members = tuple(
        Workload(name, {m: rate * m**0.95 for m in range(1, 9)}, 1000.0)
        for name, rate in (("a", 40.0), ("b", 40.0), ("c", 100.0))
    )
    given = allocations(request(members, 8, delta=20))
    assert {allocation.member: allocation.gpus for allocation in given} == {"c": 1, "a": 4, "b": 3}
    assert all(len(allocation.placement) == 1 for allocation in given)


def test_without_gpus_or_members_there_is_no_flotilla() -> None:
    assert allocations(request((), 4)) == ()
    assert allocations(Request((linear("a", 1),), (Node("n", ()),), 4, 0, Options())) == ()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(20, 180), st.floats(0.7, 1.0), st.integers(1, 16)), min_size=1, max_size=10),
    st.integers(1, 40),
)
def test_one_pass_finds_what_the_papers_search_finds(
    shapes: list[tuple[float, float, int]], gpus: int
) -> None:
    members = tuple(
        Workload(f"m{i}", {m: rate * m**power for m in range(1, most + 1)}, 1.0)
        for i, (rate, power, most) in enumerate(shapes)
    )
    assert create_flotilla(members, gpus, Options(delta=20)) == algorithm_2(members, gpus, 20.0)


def algorithm_2(members: tuple[Workload, ...], gpus: int, delta: float) -> dict[str, int]:
    """Lines 1 to 11 as they are printed, with findNext written out."""
    fast = max(members, key=lambda member: member.rates[1])
    counts = {fast.name: 1}
    while len(counts) < len(members):
        choices = [
            (abs(rate - fast.rates[1]), order, m)
            for order, member in enumerate(members)
            if member.name not in counts
            for m, rate in member.rates.items()
            if abs(rate - fast.rates[1]) <= delta and m <= gpus - sum(counts.values())
        ]
        if not choices:
            break
        _, order, m = min(choices)
        counts[members[order].name] = m
    return counts
