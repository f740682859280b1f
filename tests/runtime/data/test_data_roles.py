"""Roles of ranks in a round, and numbers of preprocessors on its nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.profile import PreprocessPoint
from hetctl.runtime.data.roles import roles_of

POINTS = [PreprocessPoint(1, 100.0), PreprocessPoint(8, 800.0)]


def allocation(member, rate, **gpus):
    places = tuple(Placement(node, tuple(numbers)) for node, numbers in gpus.items())
    return Allocation(member, sum(len(p.gpus) for p in places), DATA_PARALLEL, rate, places)


ROUND = [
    allocation("a", 300.0, n1=[0, 1], n2=[0]),
    allocation("b", 100.0, n1=[2]),
    allocation("c", 150.0, n2=[1]),
]


def test_ranks_are_numbered_by_node_and_the_first_of_each_leads():
    roles = roles_of(ROUND, "none", POINTS, 16)
    assert [(r.member, r.rank, r.node, r.leader, r.master) for r in roles] == [
        ("a", 0, "n1", True, True),
        ("a", 1, "n1", False, False),
        ("a", 2, "n2", True, False),
        ("b", 0, "n1", False, True),
        ("c", 0, "n2", False, True),
    ]


@pytest.mark.parametrize(
    ("sharing", "n1", "n2"),
    [
        ("none", [1, 1, 1], [2, 1]),  # 300 and 250 samples/s
        ("cached", [1, 1, 1], [2, 1]),  # as fast as a, which has all nodes' stores to itself at first
        ("lockstep", [1, 0, 0], [1, 1]),  # as slow as b on n1, as c on n2
    ],
)
def test_preprocessors_meet_the_demand_of_their_node(sharing, n1, n2):
    roles = roles_of(ROUND, sharing, POINTS, 16)
    assert [role.preprocessors for role in roles if role.node == "n1"] == n1
    assert [role.preprocessors for role in roles if role.node == "n2"] == n2


def test_ranks_with_a_core_each_share_the_burden():
    assert [role.preprocessors for role in roles_of(ROUND, "lockstep", POINTS, 5)] == [1, 1, 1, 1, 1]


rounds = st.lists(
    st.tuples(st.floats(1.0, 1e4), st.dictionaries(st.sampled_from("uvw"), st.integers(1, 4), min_size=1)),
    min_size=1,
    max_size=6,
)


@given(rounds, st.sampled_from(["none", "cached", "lockstep"]), st.integers(1, 64))
def test_any_layout(members, sharing, cores):
    allocations = [
        allocation(f"m{index}", rate, **{node: range(count) for node, count in nodes.items()})
        for index, (rate, nodes) in enumerate(members)
    ]
    roles = roles_of(allocations, sharing, POINTS, cores)
    assert [(r.member, r.rank) for r in roles] == [(a.member, r) for a in allocations for r in range(a.gpus)]
    for node in {role.node for role in roles}:
        here = [role for role in roles if role.node == node]
        assert sum(role.leader for role in here) == 1
        counts = [role.preprocessors for role in here]
        assert max(counts) - min(counts) <= 1
        assert 1 <= sum(counts) <= max(cores, len(here))
        assert min(counts) > 0 or sharing == "lockstep"
