from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.site import Cluster, Node
from hetctl.scheduling.planners.packing import pack
from hetctl.scheduling.planners.placement import NodeCapacity


def test_three_members_of_4_gpus_need_three_nodes_of_6() -> None:
    room = NodeCapacity(Cluster.of(12, 6).nodes)
    assert room.change(0, 4)
    assert room.change(0, 4)
    assert not room.change(0, 4)
    assert room.left == 4
    assert room.change(0, 2)
    assert room.change(0, 2)


def test_members_of_three_take_a_node_each_and_leave_single_gpus() -> None:
    room = NodeCapacity(Cluster.of(8, 4).nodes)
    assert [room.change(0, 3), room.change(0, 3)] == [True, True]
    assert not room.change(0, 2)
    assert [room.change(0, 1), room.change(0, 1), room.change(0, 1)] == [True, True, False]


def test_members_may_shrink_and_grow() -> None:
    room = NodeCapacity(Cluster.of(4, 4).nodes)
    assert room.change(0, 3)
    assert room.change(3, 2)
    assert room.change(0, 2)
    assert not room.change(2, 3)
    assert room.left == 0


def test_whole_nodes_and_a_part() -> None:
    room = NodeCapacity((Node("a", (0, 1, 2, 3)), Node("b", (0, 1, 2, 3)), Node("c", (0, 1))))
    assert room.change(0, 6)
    assert room.change(0, 4)
    assert room.left == 0


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 6))
def test_on_nodes_of_4_what_is_said_to_fit_can_be_packed(wishes: list[int], nodes: int) -> None:
    room, cluster = NodeCapacity(Cluster.of(4 * nodes, 4).nodes), Cluster.of(4 * nodes, 4)
    accepted = [(f"m{i}", gpus) for i, gpus in enumerate(wishes) if room.change(0, gpus)]
    _, unplaced = pack(accepted, cluster.nodes, 2000)
    assert unplaced == ()
    assert room.left == 4 * nodes - sum(gpus for _, gpus in accepted)
