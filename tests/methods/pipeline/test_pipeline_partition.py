"""Partitions: exact, within memory."""

from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_exact import least_bottleneck_s, slowest_s, stage_needs
from pipelines import LINKS, PLENTY, cluster, clusters, is_whole, profile, profiles

from hetctl.methods.pipeline import partition
from hetctl.methods.pipeline.partition import Partitioner
from hetctl.methods.pipeline.stage_costs import Links, PipelineCluster, StageCosts, minibatches_held
from hetctl.model.errors import InfeasibleError


def partitioner(layers, where, in_flight=1):
    return Partitioner(StageCosts(layers, where), where, in_flight)


@settings(max_examples=60, deadline=None)
@given(profiles(), clusters(), st.integers(1, 8))
def test_the_bottleneck_is_the_least_there_is(layers, where, in_flight):
    exact = least_bottleneck_s(layers, where, where.gpus, in_flight)
    found = partitioner(layers, where, in_flight)
    assert found.bottleneck_s(where.gpus) == pytest.approx(exact, rel=1e-9)
    if exact < float("inf"):
        cuts = found.partition(where.gpus)
        order, starts = [cut.gpu for cut in cuts], [cut.first for cut in cuts]
        assert is_whole(cuts, layers)
        assert len(set(order)) == len(order)
        assert slowest_s(layers, where, order, starts, in_flight) == pytest.approx(exact, rel=1e-9)
    else:
        with pytest.raises(InfeasibleError, match=f"N_m = {in_flight}"):
            found.partition(where.gpus)


@settings(max_examples=30)
@given(profiles(), st.integers(0, 3), st.integers(1, 8), st.booleans())
def test_bytes_of_every_stage_are_those_counted_one_by_one(layers, after, in_flight, recomputes):
    found = StageCosts(layers, cluster("A")).bytes(after, in_flight, recomputes=recomputes)
    for first in range(len(layers.layers)):
        held = minibatches_held(after, in_flight, is_first=not first)
        for last in range(first, len(layers.layers)):
            assert found[first, last] == stage_needs(layers, first, last, held, recomputes=recomputes)


def test_the_faster_gpu_gets_more_layers():
    free = Links(1e12, 1.0, 0.0, 0.0)
    where = cluster("A", "B", links=free)
    cuts = partitioner(profile(1, 1, 1, 1, 1, 1), where).partition(where.gpus)
    layers = {where.type_of(cut.gpu): cut.last - cut.first + 1 for cut in cuts}
    assert layers == {"A": 4, "B": 2}


def test_a_gpu_that_would_slow_down_the_pipeline_stays_idle():
    where = cluster("A", "A")
    cuts = partitioner(profile(1, 1, activation=1000), where).partition(where.gpus)
    assert len(cuts) == 1


def test_adjacent_stages_share_a_node_where_that_is_faster():
    where = cluster("AA", "A")
    cuts = partitioner(profile(4, 4, 4), where).partition(where.gpus)
    assert [cut.gpu[0] for cut in cuts] in ([0, 0, 1], [1, 0, 0])


def test_more_minibatches_in_flight_need_more_memory():
    where = cluster("A", "A", memory=300)
    layers = profile(1, 1, 1, 1, activation=10, parameters=20)
    seconds = [partitioner(layers, where, number).bottleneck_s(where.gpus) for number in range(1, 10)]
    assert seconds == sorted(seconds)


def test_a_framework_takes_room_from_layers():
    layers = profile(1, 1, 1, 1, activation=10, parameters=20)
    free = PipelineCluster((("A", "A"),), {"A": 240}, LINKS)
    assert len(partitioner(layers, free).partition(free.gpus)) == 2
    with pytest.raises(InfeasibleError):
        partitioner(layers, replace(free, context_bytes={"A": 80})).partition(free.gpus)


def test_like_gpus_are_not_tried_in_every_order():
    where = cluster("AAAA", "AAAA", "AAAA", "AAAA", memory=PLENTY, links=LINKS)
    found = partitioner(profile(*range(1, 21)), where, 4)
    assert found.bottleneck_s(where.gpus) < float("inf")
    assert len(found.partition(where.gpus)) <= 16


def test_a_group_with_too_many_orders_is_still_partitioned():
    where = cluster(*("ABC" * count for count in range(1, 8)))
    found = partitioner(profile(*range(1, 100), activation=1), where)
    cuts = found.partition(where.gpus)
    assert len({cut.gpu for cut in cuts}) == len(cuts)
    assert found.bottleneck_s(where.gpus) <= found.bottleneck_s(where.on(6))


@settings(max_examples=60, deadline=None)
@given(profiles(), clusters(), st.integers(1, 8), st.sampled_from([0.0, 2.5e6]))
def test_an_inexact_partition_fits_and_has_the_time_it_says(layers, where, in_flight, effort):
    exact = least_bottleneck_s(layers, where, where.gpus, in_flight)
    with mock.patch.object(partition, "MOST_EFFORT", effort):
        found = partitioner(layers, where, in_flight)
        seconds = found.bottleneck_s(where.gpus)
        assert seconds >= exact * (1 - 1e-9)
        if seconds < float("inf"):
            cuts = found.partition(where.gpus)
            assert is_whole(cuts, layers)
            order, starts = [cut.gpu for cut in cuts], [cut.first for cut in cuts]
            assert len(set(order)) == len(order)
            assert slowest_s(layers, where, order, starts, in_flight) == pytest.approx(seconds)
