from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.plan import Allocation, Placement
from hetctl.model.site import Cluster, Node
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Options, Request, RunningMember
from hetctl.scheduling.planners.packing import pack
from hetctl.scheduling.planners.placement import NodeCapacity, place_members

RATES = {gpus: 10.0 * gpus for gpus in range(1, 17)}


def member(name: str) -> Workload:
    return Workload(name, RATES, 1000.0)


def held(name: str, *parts: tuple[str, tuple[int, ...]], fixed: bool = False) -> RunningMember:
    placement = tuple(Placement(node, gpus) for node, gpus in parts)
    count = sum(len(part.gpus) for part in placement)
    return RunningMember(
        member(name), Allocation(name, count, "data-parallel", RATES[count], placement), 0.0, fixed
    )


def request(holders: tuple[RunningMember, ...], waiting: str, nodes: int = 2, size: int = 4) -> Request:
    cluster = Cluster.of(nodes * size, size)
    taken = {(p.node, gpu) for h in holders for p in h.allocation.placement for gpu in p.gpus}
    free = tuple(Node(n.name, tuple(g for g in n.gpus if (n.name, g) not in taken)) for n in cluster.nodes)
    return Request(
        tuple(member(name) for name in waiting),
        tuple(node for node in free if node.gpus),
        cluster.gpus,
        0,
        Options(),
        holders,
        cluster.nodes,
    )


def test_a_member_that_finds_no_more_gpus_keeps_its_own() -> None:
    """No node has 4 for it, and as many as it has would be free on the first node, too."""
    holders = (
        held("a", ("node-1", (0, 1, 2))),
        held("b", ("node-0", (3,)), fixed=True),
        held("c", ("node-1", (3,)), fixed=True),
    )
    decision, given_ = place_members(request(holders, ""), {"a": 4, "b": 1, "c": 1})
    assert (decision.start, decision.stop, given_) == ((), (), {"a": 3, "b": 1, "c": 1})


def test_a_member_with_the_same_count_keeps_its_gpus() -> None:
    asked = request((held("a", ("node-0", (1, 2))),), "b")
    decision, given_ = place_members(asked, {"a": 2, "b": 2})
    assert [(a.member, a.placement) for a in decision.start] == [("b", (Placement("node-0", (0, 3)),))]
    assert (decision.stop, given_) == ((), {"a": 2, "b": 2})


def test_a_member_without_gpus_is_stopped_and_replaced() -> None:
    asked = request((held("a", ("node-0", (0, 1, 2, 3))), held("b", ("node-1", (0, 1, 2, 3)))), "c")
    decision, _ = place_members(asked, {"b": 4, "c": 4})
    assert decision.stop == ("a",)
    assert [(a.member, a.placement) for a in decision.start] == [("c", (Placement("node-0", (0, 1, 2, 3)),))]


def test_small_members_make_room_for_a_larger_one() -> None:
    asked = request((held("a", ("node-0", (0,))), held("b", ("node-1", (0,)))), "c")
    decision, given_ = place_members(asked, {"a": 1, "b": 1, "c": 4})
    moved = {a.member: a.placement for a in decision.start}
    assert moved["c"] == (Placement("node-0", (0, 1, 2, 3)),)
    assert moved["a"] == (Placement("node-1", (1,)),)
    assert "b" not in moved
    assert given_ == {"a": 1, "b": 1, "c": 4}


def test_fixed_members_neither_move_nor_stop() -> None:
    holders = (held("a", ("node-0", (0,)), fixed=True), held("b", ("node-1", (0,)), fixed=True))
    decision, given_ = place_members(request(holders, "c"), {"c": 4})
    assert [(a.member, a.gpus) for a in decision.start] == [("c", 3)]
    assert (decision.stop, given_) == ((), {"a": 1, "b": 1, "c": 3})


def test_more_than_a_node_is_whole_nodes_and_a_part() -> None:
    decision, _ = place_members(request((held("a", ("node-1", (0, 1))),), "b", nodes=3), {"a": 2, "b": 6})
    assert [[len(p.gpus) for p in a.placement] for a in decision.start] == [[4, 2]]


counts = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 7))


@settings(deadline=None)
@given(counts, counts, st.integers(1, 4))
def test_from_any_state_to_any_other(before: dict[str, int], after: dict[str, int], nodes: int) -> None:
    first, _ = place_members(request((), "abcdefgh", nodes), before)
    holders = tuple(RunningMember(member(a.member), a, 0.0) for a in first.start)
    names = {holder.workload.name for holder in holders}
    asked = request(holders, "".join(n for n in "abcdefgh" if n not in names), nodes)
    decision, given_ = place_members(asked, after)
    changed = {a.member: a for a in decision.start}
    kept = [h.allocation for h in holders if h.workload.name not in {*changed, *decision.stop}]
    final = [*changed.values(), *kept]
    used = [(part.node, gpu) for a in final for part in a.placement for gpu in part.gpus]
    assert len(used) == len(set(used)) <= 4 * nodes
    assert {a.member: a.gpus for a in final} == given_
    assert all(given_[name] <= after.get(name, 0) for name in given_)
    assert all(len(a.placement) == -(-a.gpus // 4) for a in final)
    if sum(after.values()) <= 4 * nodes and max(after.values(), default=0) <= 1:
        assert given_ == {name: gpus for name, gpus in after.items() if gpus}


@pytest.mark.parametrize(
    ("sizes", "changes", "left"),
    [
        # Three members of 4 need three nodes of 6.
        ((6, 6), [(0, 4, True), (0, 4, True), (0, 4, False), (0, 2, True), (0, 2, True)], 0),
        ((4, 4), [(0, 3, True), (0, 3, True), (0, 2, False), (0, 1, True), (0, 1, True), (0, 1, False)], 0),
        # Members shrink and grow.
        ((4,), [(0, 3, True), (3, 2, True), (0, 2, True), (2, 3, False)], 0),
        # Whole nodes and a part of another.
        ((4, 4, 2), [(0, 6, True), (0, 4, True)], 0),
    ],
)
def test_counts_fit_each_on_as_few_nodes_as_it_needs(
    sizes: tuple[int, ...], changes: list[tuple[int, int, bool]], left: int
) -> None:
    room = NodeCapacity([Node(f"n{i}", tuple(range(size))) for i, size in enumerate(sizes)])
    assert [room.change(before, after) for before, after, _ in changes] == [fits for *_, fits in changes]
    assert room.left == left


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 6))
def test_on_nodes_of_4_what_is_said_to_fit_can_be_packed(wishes: list[int], nodes: int) -> None:
    room, cluster = NodeCapacity(Cluster.of(4 * nodes, 4).nodes), Cluster.of(4 * nodes, 4)
    accepted = [(f"m{i}", gpus) for i, gpus in enumerate(wishes) if room.change(0, gpus)]
    _, unplaced = pack(accepted, cluster.nodes, 2000)
    assert unplaced == ()
    assert room.left == 4 * nodes - sum(gpus for _, gpus in accepted)
