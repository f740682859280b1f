"""Plans on trial: minibatches in flight that it takes, within memory, and the fastest of several plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.planners.pipeline.cluster import PipelineCluster
from hetctl.planners.pipeline.communication import Links
from hetctl.planners.pipeline.layers import Layer, LayerProfile
from hetctl.planners.pipeline.plan import PipelineOptions, PipelinePlan, plan
from hetctl.simulator.pipeline_trials import Synchronised

PARAMETERS = 10**7
LAYERS = LayerProfile(
    tuple(
        Layer(f"l{i}", {"a": 0.01, "b": 0.02}, {"a": 0.02, "b": 0.04}, 10**6 * (1 + i % 3), PARAMETERS)
        for i in range(8)
    )
)
CLUSTER = PipelineCluster(
    nodes=(("a", "a"), ("b", "b")),
    memory_bytes={"a": 10**10, "b": 10**10},
    links=Links(1e10, 0.8, 1e-4, 1e-9),
)
SETTING = Synchronised(LAYERS, CLUSTER, distance=0, placement="local")


def in_flight(planned: PipelinePlan) -> int:
    return planned.virtual_workers[0].in_flight


def cuts(planned: PipelinePlan) -> list[list[tuple[int, int]]]:
    return [[(stage.node, stage.last) for stage in worker.stages] for worker in planned.virtual_workers]


def efficiency(setting: Synchronised, planned: PipelinePlan) -> float:
    return setting.run(planned, 12).throughput * planned.bottleneck_s / len(planned.virtual_workers)


@pytest.mark.parametrize("placement", ["local", "round-robin"])
@pytest.mark.parametrize("policy", ["np", "ed", "hd", "best"])
def test_with_memory_the_slowest_stage_is_kept_busy(policy: str, placement: str) -> None:
    setting = replace(SETTING, placement=placement)
    planned = plan(LAYERS, CLUSTER, policy)
    deeper = setting.deepened(planned)
    assert efficiency(setting, deeper) >= 0.95
    assert cuts(deeper) == cuts(planned)
    assert in_flight(deeper) >= in_flight(planned)
    assert {worker.in_flight for worker in deeper.virtual_workers} == {in_flight(deeper)}


def test_no_more_than_it_takes() -> None:
    one = plan(LAYERS, CLUSTER, "np", PipelineOptions(in_flight=1))
    deeper = SETTING.deepened(one)
    assert in_flight(deeper) < 8
    assert SETTING.deepened(deeper) == deeper


def test_a_gpu_that_is_full_takes_no_more() -> None:
    one = plan(LAYERS, CLUSTER, "np", PipelineOptions(in_flight=1))
    full = max(stage.bytes for worker in one.virtual_workers for stage in worker.stages)
    tight = replace(CLUSTER, memory_bytes={"a": full, "b": full})
    assert replace(SETTING, cluster=tight).deepened(one) == one


def test_waves_that_take_long_to_send_want_more_in_flight_or_a_greater_distance() -> None:
    slow = replace(CLUSTER, links=Links(1e10, 0.8, 1e-4, 2e-9))
    planned = plan(LAYERS, slow, "ed")
    near, far = (Synchronised(LAYERS, slow, distance, "round-robin") for distance in (0, 4))
    assert efficiency(near, planned) < efficiency(far, planned)
    assert in_flight(near.deepened(planned)) > in_flight(planned)
    assert efficiency(near, near.deepened(planned)) >= 0.95


def test_the_fastest_of_several() -> None:
    plans = [plan(LAYERS, CLUSTER, policy, PipelineOptions(in_flight=3)) for policy in ("np", "ed", "hd")]
    rates = [SETTING.run(planned, 12).throughput for planned in plans]
    assert SETTING.fastest(plans) == plans[rates.index(max(rates))]
