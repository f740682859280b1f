"""From a plan to pipelines: what passes receive, what is held, and that they run as was planned."""

from __future__ import annotations

import pytest

from hetctl.methods.pipeline.communication import Links
from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.layers import Layer, LayerProfile
from hetctl.methods.pipeline.pipeline_plan import (
    POLICIES,
    PipelineOptions,
    PipelinePlan,
    Stage,
    VirtualWorker,
    Waves,
)
from hetctl.methods.pipeline.pipeline_plan import plan as made
from hetctl.methods.pipeline.simulation_input import pipelines_of, simulate_plan
from hetctl.methods.pipeline.sync_cost import PLACEMENTS

LAYERS = LayerProfile(tuple(Layer(f"l{i}", {"a": 1.0}, {"a": 2.0}, 50, 100) for i in range(4)))
CLUSTER = PipelineCluster(
    nodes=(("a", "a"), ("a", "a")),
    memory_bytes={"a": 10**9},
    links=Links(intra_bytes_per_s=1000.0, intra_scaling=0.5, inter_latency_s=0.1, inter_s_per_byte=0.01),
)


def worker(*places: tuple[int, int], in_flight: int = 4) -> VirtualWorker:
    """Two stages of two layers each; 50 bytes take 0.6 s between nodes, 0.1 s within one."""
    receive_s = 0.6 if places[0][0] != places[1][0] else 0.1
    stages = [
        Stage(2 * i, 2 * i + 1, node, gpu, "a", 2.0, 4.0, receive_s, 0)
        for i, (node, gpu) in enumerate(places)
    ]
    return VirtualWorker(tuple(stages), in_flight)


def plan(*workers: VirtualWorker) -> PipelinePlan:
    return PipelinePlan("np", workers, 1.0, 1.0, 1.0)


EQUAL = (worker((0, 0), (1, 0)), worker((0, 1), (1, 1)))


def test_passes_wait_for_what_they_receive() -> None:
    (one,) = pipelines_of(plan(EQUAL[0]), LAYERS, CLUSTER, "local")
    times = [(stage.forward_s, stage.backward_s) for stage in one.stages]
    assert times == [pytest.approx((2.0, 4.6)), pytest.approx((2.6, 4.0))]
    assert one.bottleneck_s == pytest.approx(EQUAL[0].bottleneck_s)


def test_the_last_stage_holds_one_minibatch_and_the_first_what_is_in_flight() -> None:
    for in_flight, held in ((1, [1, 1]), (2, [2, 1]), (4, [3, 1])):
        (one,) = pipelines_of(plan(worker((0, 0), (1, 0), in_flight=in_flight)), LAYERS, CLUSTER, "local")
        assert [stage.most_held for stage in one.stages] == held


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("distance", [0, 2])
def test_a_plan_with_waves_is_as_fast_as_it_says(placement: str, distance: int) -> None:
    waves = Waves(distance, placement)
    for policy in POLICIES:
        planned = made(LAYERS, CLUSTER, policy, PipelineOptions(waves=waves))
        run = simulate_plan(planned, LAYERS, CLUSTER, waves, 40)
        assert run.throughput == pytest.approx(planned.throughput, rel=0.02)
