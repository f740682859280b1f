"""Partitions: their paths, and the nodes on which plans expect them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.ensemble import Partitions

NODES = ["node-0", "node-1", "node-2"]


def test_a_pattern_gives_a_path_for_each_number():
    assert Partitions(2, "$D/{partition}/{partition}.npz").paths() == ("$D/0/0.npz", "$D/1/1.npz")
    assert Partitions(2).paths() == ()


def test_parts_without_nodes_are_assigned_in_turn():
    assert Partitions(4).homes(NODES) == {"node-0": {0, 3}, "node-1": {1}, "node-2": {2}}


def test_replicas_are_on_the_following_nodes():
    assert Partitions(2, replicas=2).homes(NODES) == {"node-0": {0}, "node-1": {0, 1}, "node-2": {1}}
    assert Partitions(2, replicas=9).homes(NODES) == {node: {0, 1} for node in NODES}


def test_sources_are_those_of_the_pattern_or_of_each_part():
    assert Partitions(2, "/p/{partition}", "/s/{partition}").sources() == ("/s/0", "/s/1")
    assert Partitions(2, files=("/a", "/b"), source_files=("", "/s/b")).sources() == ("", "/s/b")
    assert Partitions(2, files=("/a", "/b"), source_files=("", "")).sources() == ()


def test_names_stand_for_nodes_in_their_order():
    parts = Partitions(4, files=("a",) * 4, nodes=(("x", "y"), ("y",), (), ("z", "node-0")))
    assert parts.homes(NODES) == {"node-0": {0, 3}, "node-1": {0, 1}, "node-2": {2, 3}}


def test_real_names_are_those_of_the_job():
    parts = Partitions(2, files=("a",) * 2, nodes=(("b",), ("a",)))
    assert parts.homes(["a", "b"]) == {"a": {1}, "b": {0}}


@given(
    st.lists(st.lists(st.sampled_from("abcdef"), max_size=3, unique=True).map(tuple), min_size=1, max_size=9),
    st.integers(1, 5),
)
def test_every_part_is_expected_somewhere(nodes, count):
    homes = Partitions(len(nodes), files=("p",) * len(nodes), nodes=tuple(nodes)).homes(
        [f"node-{i}" for i in range(count)]
    )
    assert set().union(*homes.values()) == set(range(len(nodes)))
