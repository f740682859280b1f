from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.plan import Placement
from hetctl.model.site import Cluster, Node
from hetctl.scheduling.planners import packing
from hetctl.scheduling.planners.packing import pack

Placements = dict[str, tuple[Placement, ...]]


def nodes_of(*sizes: int) -> tuple[Node, ...]:
    return tuple(Node(f"n{index}", tuple(range(size))) for index, size in enumerate(sizes))


def fewest(gpus: int, nodes: Sequence[Node]) -> int:
    count = 0
    for size in sorted((len(node.gpus) for node in nodes), reverse=True):
        if gpus <= 0:
            break
        gpus, count = gpus - size, count + 1
    return count


def where(placements: Placements) -> dict[str, dict[str, int]]:
    return {name: {p.node: len(p.gpus) for p in parts} for name, parts in placements.items()}


def test_whole_nodes_then_pairs_then_the_rest() -> None:
    # The paper's order: 4 fills a node, 3 + 1 and 5 + 3 fill nodes in pairs, 2 remains.
    counts = [("two", 2), ("three", 3), ("four", 4), ("one", 1), ("five", 5), ("last", 3)]
    placements, unplaced = pack(counts, Cluster.of(20, 4).nodes, 1024)
    assert unplaced == ()
    assert where(placements)["four"] == {"node-0": 4}
    (three,), (one,) = where(placements)["three"], where(placements)["one"]
    assert three == one
    assert len(placements["five"]) == 2
    assert set(where(placements)["last"]) < set(where(placements)["five"])


def test_members_with_alike_remainders_are_all_paired() -> None:
    counts = [("a", 3), ("b", 3), ("c", 1), ("d", 1)]
    placements, unplaced = pack(counts, Cluster.of(8, 4).nodes, 1)
    assert unplaced == ()
    assert all(len(parts) == 1 for parts in placements.values())


def test_three_members_of_4_gpus_do_not_fit_two_nodes_of_6() -> None:
    counts = [("a", 4), ("b", 4), ("c", 4)]
    placements, unplaced = pack(counts, nodes_of(6, 6), 1024)
    assert unplaced == ("c",)
    assert where(placements) == {"a": {"n0": 4}, "b": {"n1": 4}}
    assert pack(counts, nodes_of(6, 6, 6), 1024)[1] == ()


def test_names_and_indices_are_those_of_the_free_gpus() -> None:
    nodes = (Node("x", (1, 3)), Node("y", ()), Node("z", (0, 2, 5)))
    placements, unplaced = pack([("a", 3), ("b", 2)], nodes, 1024)
    assert placements == {"a": (Placement("z", (0, 2, 5)),), "b": (Placement("x", (1, 3)),)}
    assert unplaced == ()


def test_small_members_take_the_tightest_fit() -> None:
    placements, unplaced = pack([("small", 2), ("large", 4)], nodes_of(4, 2), 1)
    assert unplaced == ()
    assert where(placements) == {"small": {"n1": 2}, "large": {"n0": 4}}


def test_more_orders_find_room_that_the_first_does_not() -> None:
    # Largest first has 5 and 3 on the node of 9, which leaves 1 idle; three times 3 fills it.
    counts, nodes = [("a", 5), ("b", 3), ("c", 3), ("d", 3)], nodes_of(9)
    assert pack(counts, nodes, 1)[1] == ("c", "d")
    assert pack(counts, nodes, 1024)[1] == ("a",)


def test_members_are_unplaced_without_enough_gpus() -> None:
    assert pack([("a", 1)], (), 1024) == ({}, ("a",))
    assert pack([("a", 3)], nodes_of(1, 1), 1024) == ({}, ("a",))


def test_as_few_nodes_as_on_the_whole_cluster() -> None:
    cluster = Cluster.of(16, 4).nodes
    fragments = tuple(Node(node.name, node.gpus[:1]) for node in cluster)
    assert pack([("a", 4)], fragments, 1024) == (
        {"a": tuple(Placement(node.name, (0,)) for node in cluster)},
        (),
    )
    assert pack([("a", 4), ("b", 1)], fragments, 1024, cluster) == (
        {"b": (Placement("node-0", (0,)),)},
        ("a",),
    )


def test_a_wide_member_gets_whole_nodes_and_the_tightest_part() -> None:
    cluster = Cluster.of(16, 4).nodes
    free = (*nodes_of(2, 3), *cluster[2:])
    placements, unplaced = pack([("a", 10)], free, 1, cluster)
    assert unplaced == ()
    assert where(placements) == {"a": {"n0": 2, "node-2": 4, "node-3": 4}}
    assert pack([("a", 12)], free, 1, cluster)[1] == ("a",)


def test_thousands_of_members_are_packed_at_once() -> None:
    counts = [(f"m{index}", 1 + index * 7 % 19) for index in range(10_000)]
    cluster = Cluster.of(100_000, 4)
    placements, unplaced = pack(counts, cluster.nodes, 1024)
    assert unplaced == ()
    assert len(placements) == 10_000


def test_hard_cases_try_no_more_orders_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing fits exactly, so that all orders would have to be tried.
    counts = [(f"m{index}", gpus) for index, gpus in enumerate([25, 23, 19, 17, 15, 13, 11, 9, 7, 5, 3] * 2)]
    nodes = nodes_of(*[7, 8, 5, 8, 6] * 9)
    tried: list[int] = []
    after = packing._Free.after

    def counted(free: packing._Free, gpus: int, members: int) -> tuple[packing._Free, int]:
        tried.append(gpus)
        return after(free, gpus, members)

    monkeypatch.setattr(packing._Free, "after", counted)
    pack(counts, nodes, 1024)
    first_order = len({gpus for _, gpus in counts})
    assert first_order < len(tried) < first_order + 1024


layouts = st.lists(st.integers(0, 8), min_size=1, max_size=6).map(lambda sizes: nodes_of(*sizes))
wishes = st.lists(st.integers(1, 12), min_size=1, max_size=8).map(
    lambda counts: [(f"m{index}", count) for index, count in enumerate(counts)]
)


@settings(deadline=None)
@given(wishes, layouts, st.sampled_from([1, 24, 1024]))
def test_each_member_is_whole_on_the_fewest_nodes_or_not_placed(
    counts: list[tuple[str, int]], nodes: tuple[Node, ...], limit: int
) -> None:
    placements, unplaced = pack(counts, nodes, limit)
    assert sorted([*placements, *unplaced]) == sorted(name for name, _ in counts)
    taken = [(p.node, gpu) for parts in placements.values() for p in parts for gpu in p.gpus]
    assert len(taken) == len(set(taken))
    assert set(taken) <= {(node.name, gpu) for node in nodes for gpu in node.gpus}
    for name, count in counts:
        if name in placements:
            assert sum(len(part.gpus) for part in placements[name]) == count
            assert len(placements[name]) == fewest(count, nodes)
    assert pack(counts, nodes, limit) == (placements, unplaced)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from([4, 6]),
)
def test_no_order_of_single_members_places_more_on_equal_nodes(
    sizes: list[int], count: int, node_size: int
) -> None:
    sizes = [min(size, node_size) for size in sizes]
    named = [(f"m{index}", size) for index, size in enumerate(sizes)]
    _, unplaced = pack(named, nodes_of(*[node_size] * count), 1024)
    best = min(first_fit(order, count, node_size) for order in permutations(sizes))
    assert sum(dict(named)[name] for name in unplaced) <= best


def first_fit(order: Sequence[int], count: int, node_size: int) -> int:
    """Return the GPUs that found no room."""
    free, out = [node_size] * count, 0
    for size in order:
        fits = [index for index in range(count) if free[index] >= size]
        if fits:
            free[fits[0]] -= size
        else:
            out += size
    return out
