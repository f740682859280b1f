"""Waves: how long they are on their way, and plans that count it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_exact import groupings
from pipelines import PLENTY, cluster, clusters, profile, profiles

from hetctl.methods.pipeline.grouping import GROUPINGS
from hetctl.methods.pipeline.pipeline_plan import GroupingEvaluator, PipelineOptions, plan
from hetctl.methods.pipeline.stage_costs import Layer, LayerProfile, Links, PipelineCluster, most_in_flight
from hetctl.methods.pipeline.stages import VirtualWorker
from hetctl.methods.pipeline.throughput import Pipeline, common_period_s, least_period_s
from hetctl.methods.pipeline.transfers import IN, OUT, SERVER, Leg, Traffic, Waves, at_once_s, traffic_of
from hetctl.model.errors import InfeasibleError
from hetctl.model.pipelines import Stage
from hetctl.model.plan import LOCAL, PS_PLACEMENTS, ROUND_ROBIN

LAYERS = LayerProfile(tuple(Layer(f"l{i}", {"a": 1.0}, {"a": 2.0}, 50, 100) for i in range(4)))
CLUSTER = PipelineCluster(
    nodes=(("a", "a"), ("a", "a")),
    memory_bytes={"a": PLENTY},
    links=Links(intra_bytes_per_s=1000.0, intra_scaling=0.5, inter_latency_s=0.1, inter_s_per_byte=0.01),
)
PASSES = st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=5).map(tuple)
LINES = st.none() | st.tuples(st.sampled_from((OUT, IN, SERVER)), st.integers(0, 1))
LANES = st.lists(st.tuples(st.builds(Leg, LINES, st.floats(0.01, 20))), max_size=3).map(tuple)
TRAFFIC = st.builds(Traffic, push=LANES, pull=LANES)
SYNCED = st.lists(st.builds(Pipeline, PASSES, TRAFFIC), min_size=1, max_size=3).map(tuple)
DISTANCES = st.integers(0, 3)
WAVES = st.builds(Waves, st.integers(0, 2), st.sampled_from(PS_PLACEMENTS))


def worker(*places: tuple[int, int], in_flight: int = 4) -> VirtualWorker:
    """Two stages of two layers each."""
    stages = [
        Stage(2 * i, 2 * i + 1, node, gpu, "a", 2.0, 4.0, 0.1, 0) for i, (node, gpu) in enumerate(places)
    ]
    return VirtualWorker(tuple(stages), in_flight)


EQUAL = (worker((0, 0), (1, 0)), worker((0, 1), (1, 1)))
BY_NODE = (worker((0, 0), (0, 1)), worker((1, 0), (1, 1)))


def synchronisation_s(workers: tuple[VirtualWorker, ...], placement: str) -> float:
    return at_once_s([one.push for one in traffic_of(workers, LAYERS, CLUSTER, placement)])


def test_equal_distribution_with_local_servers_crosses_no_node() -> None:
    assert synchronisation_s(EQUAL, LOCAL) == pytest.approx(200 / 500)


def test_round_robin_servers_send_half_the_layers_across_nodes() -> None:
    assert synchronisation_s(EQUAL, ROUND_ROBIN) == pytest.approx(0.1 + 200 * 0.01)


def test_node_partition_shares_servers_of_other_nodes_evenly() -> None:
    for placement in PS_PLACEMENTS:
        assert synchronisation_s(BY_NODE, placement) == pytest.approx(0.1 + 200 * 0.01)


def test_parameters_and_activations_share_the_links_of_a_node() -> None:
    """Three stages on two nodes; the servers' weights cross while activations do."""
    places = ((0, 0), (1, 0), (0, 1))
    stages = tuple(
        Stage(i, i, node, gpu, "a", 1.0, 2.0, 0.6 * (1 + i % 2), 0) for i, (node, gpu) in enumerate(places)
    )
    one = VirtualWorker(stages, 5)
    (traffic,) = traffic_of([one], LayerProfile(LAYERS.layers[:3]), CLUSTER, ROUND_ROBIN)
    heavy = replace(traffic, push=(*traffic.push, *[(Leg((IN, 1), 12.0), Leg((OUT, 1), 12.0))]))
    apart = replace(heavy, activations=(), gradients=())
    shared_s, apart_s = (common_period_s((Pipeline(one.passes, use),), 5, 3) for use in (heavy, apart))
    assert shared_s > 1.05 * apart_s


def test_a_server_takes_time_to_add_updates() -> None:
    slow = replace(CLUSTER, server_bytes_per_s=50.0)
    for placement, seconds in ((LOCAL, 2 * 200 / 50), (ROUND_ROBIN, 0.1 + 2 * 200 / 50)):
        pushes = [one.push for one in traffic_of(EQUAL, LAYERS, slow, placement)]
        assert at_once_s(pushes) == pytest.approx(seconds)


def test_activations_and_gradients_use_the_links_of_both_nodes() -> None:
    (one, _) = traffic_of(EQUAL, LAYERS, CLUSTER, LOCAL)
    assert one.by_minibatch == {(kind, node): pytest.approx(0.5) for kind in (IN, OUT) for node in (0, 1)}
    assert not traffic_of(BY_NODE, LAYERS, CLUSTER, LOCAL)[0].by_minibatch


@settings(max_examples=30, deadline=None)
@given(SYNCED, st.integers(1, 8), DISTANCES)
def test_waves_cost_time_and_no_period_is_below_its_limit(workers, in_flight, distance) -> None:
    with_waves = common_period_s(workers, in_flight, distance)
    assert with_waves >= least_period_s(workers, in_flight, distance) * (1 - 1e-9)


@settings(max_examples=15, deadline=None)
@given(profiles(), clusters(most_gpus=5), WAVES)
def test_with_waves_best_is_as_fast_as_the_papers_policies(layers, where, waves) -> None:
    options = PipelineOptions(waves=waves)
    reached = []
    for policy in GROUPINGS:
        try:
            reached.append(plan(layers, where, policy, options).throughput)
        except InfeasibleError:
            continue
    if reached:
        assert plan(layers, where, "best", options).throughput >= max(reached) * (1 - 1e-9)


def test_on_a_slow_network_no_weights_are_sent_over_it() -> None:
    """Two by two nothing is sent; one by one all weights are, but the last stage's."""
    layers = LayerProfile(tuple(Layer(f"l{i}", {"a": 1.0}, {"a": 2.0}, 1, 1000) for i in range(4)))
    slow = replace(CLUSTER, links=Links(1e6, 1.0, 1e-4, 1.0))
    found = plan(layers, slow)
    assert found.synchronisation_s < 1.0
    assert all(len({s.node for s in w.stages}) == 2 for w in found.virtual_workers)
    assert found.throughput > 2 * plan(layers, slow, "np").throughput


def test_more_distance_or_more_in_flight_offsets_slow_waves() -> None:
    def throughput(distance: int, in_flight: int | None) -> float:
        waves = Waves(distance, ROUND_ROBIN)
        return plan(LAYERS, CLUSTER, "ed", PipelineOptions(in_flight, waves=waves)).throughput

    assert throughput(0, 2) < throughput(3, 2)
    assert throughput(0, 2) < throughput(0, None)


@pytest.mark.parametrize("placement", PS_PLACEMENTS)
@pytest.mark.parametrize("s_per_byte", [0.001, 0.05])
@pytest.mark.parametrize("nodes", [("AA", "BB"), ("A", "B", "A", "B"), ("AB", "AB")])
def test_best_is_near_the_best_of_all_groupings(nodes, s_per_byte, placement) -> None:
    layers = profile(1, 2, 3, 2, 1, 2, activation=10, parameters=50)
    where = cluster(*nodes, links=Links(1000.0, 0.5, 0.01, s_per_byte))
    waves = Waves(0, placement)
    found = plan(layers, where, "best", PipelineOptions(waves=waves)).throughput
    evaluator = GroupingEvaluator(layers, where, waves)
    most = most_in_flight(len(where.gpus))
    partitioned = [evaluator.evaluate(grouping, most) for grouping in groupings(where.gpus) if grouping]
    # At any depth a virtual worker ends a minibatch in the time of its slowest stage at best.
    rivals = [one for one in partitioned if 0.97 * len(one.grouping) / one.bottleneck_s > found]
    assert all(found >= 0.97 * evaluator.with_best_depth(one).throughput for one in rivals)
