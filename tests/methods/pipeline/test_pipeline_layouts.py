"""Layouts: each rank its layers, each layer its server, and members one after another."""

from __future__ import annotations

import pytest

from hetctl.methods.pipeline.layouts import Layouts, PipelineProblem, lay_out, pipeline_planner
from hetctl.methods.pipeline.pipeline_plan import PipelineOptions, plan
from hetctl.methods.pipeline.stage_costs import UNNAMED, Layer, LayerProfile, Links, PipelineCluster
from hetctl.methods.pipeline.transfers import Waves
from hetctl.model.errors import InfeasibleError
from hetctl.model.serialization import encode
from hetctl.model.site import Node
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Options, Request

NODES = (Node("n1", (0, 1)), Node("n2", (2, 3)))


def problem(policy="np", memory=20_000, **how):
    layers = tuple(Layer(f"l{n}", {UNNAMED: 1.0}, {UNNAMED: 2.0}, 100, 1000) for n in range(4))
    how = {"in_flight": 2, "search_s": 0.2, **how}
    return PipelineProblem(
        LayerProfile(layers), {UNNAMED: memory}, Links(1e6, 1.0, 1e-6, 1e-6), 8, policy=policy, **how
    )


@pytest.mark.parametrize(
    ("policy", "placement"), [("np", "local"), ("ed", "local"), ("ed", "round-robin"), ("best", "local")]
)
def test_each_rank_has_a_stage_and_each_layer_a_server(policy, placement):
    found = lay_out(problem(policy, waves=Waves(1, placement)), NODES)
    layout = found.layout
    gpus = [(place.node, gpu) for place in found.placement for gpu in place.gpus]
    plans = [plan for stages in layout.workers for plan in stages]
    assert sorted(plan.rank for plan in plans) == list(range(len(gpus)))
    assert len(set(gpus)) == len(gpus)
    assert layout.workers[0][0].rank == 0
    assert layout.distance == 1
    for stages in layout.workers:
        assert [layer for plan in stages for layer in range(plan.first, plan.last + 1)] == [0, 1, 2, 3]
        assert stages[-1].held == 1
    assert len(layout.servers) == (4 if len(layout.workers) > 1 else 0)
    assert found.rate == pytest.approx(8 * len(layout.workers) / 6.0, rel=0.6)
    nodes_of = {rank: node for rank, (node, _) in enumerate(gpus)}
    for stages in layout.workers:
        nodes = {nodes_of[plan.rank] for plan in stages}
        assert len(nodes) == {"np": 1, "ed": 2}.get(policy, len(nodes))
    if (policy, placement) == ("ed", "local"):
        # Section 8.1: no parameter crosses the network.
        for plan in plans:
            for layer in range(plan.first, plan.last + 1):
                assert nodes_of[layout.servers[layer]] == nodes_of[plan.rank]
    if placement == "round-robin":
        assert len({nodes_of[rank] for rank in layout.servers}) == 2


def test_no_more_gpus_are_used_than_a_member_may_have():
    found = lay_out(problem(memory=50_000, max_gpus=3), NODES)
    assert sum(len(place.gpus) for place in found.placement) <= 3


def test_more_minibatches_are_in_flight_than_no_stage_waits_for():
    own = problem("np", in_flight=None)
    cluster = PipelineCluster(((UNNAMED,) * 2,) * 2, own.memory_bytes, own.links)
    fewest = plan(own.layers, cluster, "np", PipelineOptions(waves=own.waves)).in_flight
    assert lay_out(own, NODES).layout.in_flight == fewest + 2


def test_no_stage_recomputes_for_the_slack_alone():
    recomputing = []
    for memory in range(6_000, 60_000, 3_000):
        own = problem("np", in_flight=None, memory=memory)
        cluster = PipelineCluster(((UNNAMED,) * 2,) * 2, own.memory_bytes, own.links)
        try:
            fewest = plan(own.layers, cluster, "np", PipelineOptions(waves=own.waves)).virtual_workers
        except InfeasibleError:
            continue
        stages = [stage for worker in fewest for stage in worker.stages]
        layout = lay_out(own, NODES).layout
        recomputing.append(any(stage.recomputes for stage in stages))
        if not recomputing[-1]:
            assert not any(one.recomputes for worker in layout.workers for one in worker)
    assert not all(recomputing)


def test_a_network_without_room_has_no_layout():
    with pytest.raises(InfeasibleError):
        lay_out(problem(memory=1500), NODES)


def test_members_train_one_after_another_and_none_without_room():
    names = ("large", "a", "b")
    problems = {"large": encode(problem(memory=1500)), "a": encode(problem()), "b": encode(problem())}
    planner = pipeline_planner(Layouts(problems).find)
    workloads = tuple(Workload(name, {4: 1.0}, 10.0) for name in names)
    request = Request(workloads, NODES, 4, 0, Options(), cluster=NODES)
    (started,) = planner.decide(request).start
    assert (started.member, started.mode, started.gpus) == ("a", "pipeline", 4)
    assert started.pipeline is not None
    busy = Request(workloads, NODES[:1], 4, 0, Options(), cluster=NODES)
    assert planner.decide(busy).start == ()
    reasons = planner.reasons(request, planner.decide(request))
    assert set(reasons) == {"large", "b"}
