"""Groupings of large clusters: cells that are alike, step-by-step changes."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import cluster, clusters, profile

from hetctl.methods.pipeline.grouping import GROUPINGS, all_cells, exact_groupings, improved
from hetctl.methods.pipeline.partition import Partitioner, all_heads, most_within, pool_of, without
from hetctl.methods.pipeline.stage_costs import StageCosts

TWICE = cluster("AAAA", "BB", "AAAA", "BB")


def makes(where, cell):
    return sorted("".join(sorted(map(where.type_of, kind))) for kind in where.kinds(cell))


@settings(max_examples=30)
@given(clusters(most_gpus=12))
def test_cells_are_alike_and_use_every_gpu_once(where):
    found = all_cells(where, 10**6)
    assert found
    for cells in found:
        assert sorted(gpu for cell in cells for gpu in cell) == sorted(where.gpus)
        assert len({tuple(makes(where, cell)) for cell in cells}) == 1


def test_cells_come_from_small_to_large():
    sizes = [len(cells[0]) for cells in all_cells(TWICE, 10**6)]
    assert sizes == [3, 6, 12]
    assert [len(cells[0]) for cells in all_cells(TWICE, 50)] == [3, 6]


@settings(max_examples=30)
@given(clusters(most_gpus=6))
def test_groupings_are_disjoint_and_reach_their_limit(where):
    found = Partitioner(StageCosts(profile(1, 2, 3, 4), where), where, 3)
    numbers = []
    for grouping in exact_groupings(where, (where.gpus,), found.bottleneck_s):
        used = [gpu for group in grouping for gpu in group]
        assert len(set(used)) == len(used)
        numbers.append(len(grouping))
    assert all(a < b for a, b in pairwise(numbers))


def test_when_time_is_over_the_small_sets_examined_are_packed():
    looked_at = []

    def bottleneck_s(group):
        looked_at.append(len(group))
        return 1.0

    where = cluster("AAAA", "BBB")
    found = list(exact_groupings(where, (where.gpus,), bottleneck_s, lambda: len(looked_at) >= 6))
    assert looked_at == [1, 1, 2, 2, 2, 3]
    assert [len(grouping) for grouping in found] == [7]


@settings(max_examples=30)
@given(clusters(most_gpus=7))
def test_the_limit_to_pools_is_one(where):
    types = where.gpu_types
    pool = pool_of(tuple(node.count(name) for name in types) for node in where.nodes)
    found = level = {pool}
    while level := {without(p, head) for p in level for head in all_heads(p)}:
        found = found | level
    assert len(found) <= most_within(pool)


@settings(max_examples=30, deadline=None)
@given(clusters(most_gpus=7), st.sampled_from(sorted(GROUPINGS)))
def test_changes_make_no_grouping_slower(where, policy):
    layers = profile(3, 1, 4, 1, 5, 9, 2, 6)
    seconds = Partitioner(StageCosts(layers, where), where, 3).bottleneck_s

    def rate(groups):
        return len(groups) / max(map(seconds, groups))

    before = GROUPINGS[policy](layers, where)
    after = improved(where, before, seconds, lambda: False, rate)
    assert rate(after) >= rate(before)
    assert {gpu for group in after for gpu in group} <= set(where.gpus)
    assert improved(where, before, seconds, lambda: True, rate) == before
