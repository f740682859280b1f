"""Plans: the paper's virtual workers, the best ones, and the limits of both."""

import math
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_exact import groupings, least_bottleneck_s, stage_needs
from pipelines import PLENTY, TYPES, cluster, clusters, is_whole, profile, profiles

from hetctl.methods.pipeline.grouping import GROUPINGS
from hetctl.methods.pipeline.partition import Partitioner
from hetctl.methods.pipeline.pipeline_plan import NEAR, POLICIES, PipelineOptions, lower_bound_s, plan
from hetctl.methods.pipeline.stage_costs import (
    LayerProfile,
    Links,
    PipelineCluster,
    StageCosts,
    minibatches_held,
)
from hetctl.methods.pipeline.transfers import Waves
from hetctl.model.errors import BadInputError, InfeasibleError

LAYERS = profile(3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)
PAPER = PipelineCluster(
    (("V",) * 4, ("R",) * 4, ("G",) * 4, ("Q",) * 4),
    {"V": 12, "R": 24, "G": 6, "Q": 8},
    cluster("A").links,
)
RATIOS = {"V": 1.0, "R": 1.1, "G": 1.6, "Q": 2.4}


def types(where, grouping):
    return sorted("".join(sorted(map(where.type_of, group))) for group in grouping)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("np", ["GGGG", "QQQQ", "RRRR", "VVVV"]),
        ("ed", ["GQRV"] * 4),
        ("hd", ["GGRR", "GGRR", "QQVV", "QQVV"]),
    ],
)
def test_the_policies_give_table_3(policy, expected):
    layers = LAYERS.derived(RATIOS, measured_on="A")
    assert types(PAPER, GROUPINGS[policy](layers, PAPER)) == expected


@settings(max_examples=30)
@given(clusters(most_gpus=12), st.sampled_from(sorted(GROUPINGS)))
def test_policies_use_every_gpu_once(where, policy):
    grouping = GROUPINGS[policy](LAYERS, where)
    assert sorted(gpu for group in grouping for gpu in group) == sorted(where.gpus)
    assert all(grouping)


@settings(max_examples=30)
@given(clusters(most_gpus=12))
def test_equal_distribution_is_equal(where):
    grouping = GROUPINGS["ed"](LAYERS, where)
    assert len({tuple(sorted((gpu[0], where.type_of(gpu)) for gpu in group)) for group in grouping}) == 1


@settings(max_examples=20, deadline=None)
@given(profiles(), clusters(most_gpus=5), st.sampled_from(POLICIES))
def test_every_plan_keeps_the_rules(layers, where, policy):
    try:
        found = plan(layers, where, policy)
    except InfeasibleError:
        return
    used = [(s.node, s.gpu) for worker in found.virtual_workers for s in worker.stages]
    assert len(set(used)) == len(used)
    assert {worker.in_flight for worker in found.virtual_workers} == {found.virtual_workers[0].in_flight}
    for worker in found.virtual_workers:
        assert is_whole(worker.stages, layers)
        for at, stage in enumerate(worker.stages):
            held = minibatches_held(len(worker.stages) - 1 - at, worker.in_flight, is_first=not at)
            needed = stage_needs(layers, stage.first, stage.last, held, recomputes=stage.recomputes)
            assert stage.bytes == needed
            assert stage.bytes <= where.free_bytes[stage.gpu_type]
            assert stage.gpu_type == where.nodes[stage.node][stage.gpu]
    assert found.lower_bound_s <= found.bottleneck_s * (1 + 1e-6)
    assert found.throughput <= len(found.virtual_workers) / found.bottleneck_s * (1 + 1e-9)


KEEPING = LayerProfile(
    tuple(replace(layer, held_bytes=100) for layer in profile(1, 1, 1, 1, parameters=1).layers)
)


@pytest.mark.parametrize(
    ("memory", "expected"), [(612, [False, False]), (611, [True, False]), (218, [True, False])]
)
def test_a_stage_recomputes_only_where_it_would_not_fit(memory, expected):
    where = cluster("AA", memory=memory, links=Links(1e12, 1.0, 0.0, 0.0))
    (worker,) = plan(KEEPING, where, "np", PipelineOptions(in_flight=3)).virtual_workers
    assert [stage.recomputes for stage in worker.stages] == expected
    # Three minibatches with two weights, and what the layers keep of all or of one; the last stage has one
    # minibatch, and the activations that it received.
    first = 3 * 2 + (1 if expected[0] else 3) * 200
    assert [stage.bytes for stage in worker.stages] == [first + 6, 2 + 200 + 10 + 6]
    backward_s = 4 / 3 + (2 / 3 if expected[0] else 0)
    assert worker.stages[0].backward_s == pytest.approx(backward_s)


def test_the_only_stage_holds_one_minibatch_of_those_in_flight():
    where, options = cluster("A", memory=416), PipelineOptions(in_flight=3)
    (worker,) = plan(KEEPING, where, "np", options).virtual_workers
    # Both passes are one task, which begins with the weights of the last one.
    assert [(stage.bytes, worker.in_flight) for stage in worker.stages] == [(4 * 100 + 4 * 4, 3)]
    with pytest.raises(InfeasibleError):
        plan(KEEPING, cluster("A", memory=415), "np", options)


@pytest.mark.parametrize(("memory", "options"), [(217, {}), (300, {"recompute": False})])
def test_what_fits_in_no_way_is_infeasible(memory, options):
    with pytest.raises(InfeasibleError):
        plan(KEEPING, cluster("AA", memory=memory), "np", PipelineOptions(in_flight=3, **options))


@settings(max_examples=25, deadline=None)
@given(profiles(most=4), st.lists(st.sampled_from(TYPES), min_size=1, max_size=4))
def test_on_one_node_best_is_near_the_best_of_all_groupings(layers, types):
    """Without weights to send, it is as fast as its slowest stage lets it be."""
    layers = LayerProfile(tuple(replace(layer, parameter_bytes=0) for layer in layers.layers))
    where = cluster(types)
    seconds = {}

    def rate(groups):
        for group in groups:
            if group not in seconds:
                seconds[group] = least_bottleneck_s(layers, where, group, 99)
        return len(groups) / max((seconds[group] for group in groups), default=math.inf)

    exact = max(map(rate, groupings(where.gpus)))
    found = plan(layers, where, "best", PipelineOptions(waves=Waves(distance=9))).throughput
    assert 0.97 * exact <= found <= exact * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(profiles(most=3), clusters(most_gpus=3), st.integers(1, 6))
def test_fewest_minibatches_in_flight_are_nearly_as_good_as_any(layers, where, in_flight):
    try:
        given_number = plan(layers, where, "ed", PipelineOptions(in_flight=in_flight))
    except InfeasibleError:
        return
    assert given_number.virtual_workers[0].in_flight == in_flight
    assert plan(layers, where, "ed").throughput >= NEAR * given_number.throughput


def test_the_bound_is_the_mean_where_all_gpus_are_alike():
    found = lower_bound_s(profile(1, 2, 3), ["A", "A"], {"A": PLENTY})
    assert found == pytest.approx(3)
    assert lower_bound_s(profile(1, 2, 3), ["A", "B"], {"A": PLENTY, "B": PLENTY}) == pytest.approx(4)


def test_memory_moves_the_bound():
    small = {"A": 30, "B": PLENTY}
    assert lower_bound_s(profile(1, 2, 3), ["A", "B"], small) > 4
    assert lower_bound_s(profile(1, 2, 3), ["A"], small) == math.inf


def test_a_large_cluster_is_planned():
    layers, where = profile(3, 1, 4, 1, 5, 9), cluster(*["AAAA", "BBBB", "CC", "AABB"] * 2)
    ticks = count()
    found = plan(layers, where, "best", PipelineOptions(seconds=10.0, clock=lambda: float(next(ticks))))
    assert found.throughput >= max(plan(layers, where, policy).throughput for policy in GROUPINGS)


def test_without_time_a_network_that_needs_all_gpus_has_a_plan():
    where = cluster("AA", "BB", memory=190)
    layers = profile(1, 1, 1, 1, activation=1, parameters=45)
    for policy in GROUPINGS:
        with pytest.raises(InfeasibleError):
            plan(layers, where, policy)
    found = plan(layers, where, "best", PipelineOptions(seconds=1e-9))
    assert len(found.virtual_workers[0].stages) == 4


def test_the_best_groups_of_a_deep_network_are_partitioned_exactly():
    layers = profile(*(1 + number % 7 for number in range(130)), activation=1)
    where = cluster("AA", "BB")
    best = plan(layers, where, "best")
    for policy in GROUPINGS:
        assert best.throughput >= plan(layers, where, policy).throughput * (1 - 1e-9)
    slowest = [
        Partitioner(StageCosts(layers, where), where, best.in_flight).bottleneck_s(group)
        for group in (tuple((s.node, s.gpu) for s in w.stages) for w in best.virtual_workers)
    ]
    assert best.bottleneck_s == pytest.approx(max(slowest))


def test_memory_that_leaves_no_room_is_refused():
    with pytest.raises(InfeasibleError, match="no room for all layers"):
        plan(LAYERS, cluster("AA", memory=100), "best")


def test_unknown_policies_types_and_numbers_are_refused():
    with pytest.raises(BadInputError, match="unknown policy 'npp'"):
        plan(LAYERS, cluster("A"), "npp")
    with pytest.raises(BadInputError, match="no times on GPU type X"):
        plan(LAYERS, PipelineCluster((("X",),), {"X": 1}, cluster("A").links))
    with pytest.raises(BadInputError, match="at least 1"):
        plan(LAYERS, cluster("A"), "np", PipelineOptions(in_flight=0))
