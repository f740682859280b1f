"""Conversion of a pipeline plan to the simulator's input: passes with transfers, and times of waves."""

from __future__ import annotations

from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.pipeline_plan import PipelinePlan, VirtualWorker
from hetctl.methods.pipeline.simulate import Pipeline, PipelineRun, StageTimes, simulate_pipelines
from hetctl.methods.pipeline.stage_memory import minibatches_held
from hetctl.methods.pipeline.sync_cost import Waves, synchronisation_s
from hetctl.methods.pipeline.wsp import Bounds

LEAST_WAVES, MINIBATCHES = 32, 4000
"""Waves of each virtual worker in the steady state, or fewer that contain this number of minibatches. The
waves until the clock distance is used up are added."""


def steady_waves(plan: PipelinePlan, waves: Waves) -> int:
    """Return the number of waves of each virtual worker that is enough to show a plan's throughput."""
    return max(2, min(LEAST_WAVES, MINIBATCHES // plan.in_flight)) + 4 * waves.distance


def simulate_plan(
    plan: PipelinePlan, layers: LayerProfile, cluster: PipelineCluster, waves: Waves, count: int
) -> PipelineRun:
    """Simulate a plan until each virtual worker has completed `count` waves, at least 2."""
    pipelines = pipelines_of(plan, layers, cluster, waves.placement)
    return simulate_pipelines(pipelines, Bounds(plan.in_flight, waves.distance), count)


def pipelines_of(
    plan: PipelinePlan, layers: LayerProfile, cluster: PipelineCluster, placement: str
) -> tuple[Pipeline, ...]:
    """Return the virtual workers of a plan; `placement` is one of `sync_cost.PLACEMENTS`."""
    sync_s = synchronisation_s(plan.virtual_workers, layers, cluster, placement)
    return tuple(Pipeline(_times(worker), sync_s, sync_s) for worker in plan.virtual_workers)


def _times(worker: VirtualWorker) -> tuple[StageTimes, ...]:
    passes = worker.passes
    return tuple(
        StageTimes(forward_s, backward_s, minibatches_held(len(passes) - number, worker.in_flight))
        for number, (forward_s, backward_s) in enumerate(passes, start=1)
    )
