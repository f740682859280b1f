"""Planning of pipelines: layers by GPU, and the outcome under a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetctl.app.pipeline.inputs import cluster_of, profile_of
from hetctl.app.pipeline.pipeline_report import PlanOutcome, SimulationOutcome, outcomes_of
from hetctl.inputs.layer_profile import read_layers
from hetctl.inputs.pipeline_cluster import read_cluster
from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.pipeline_plan import BEST, PipelineOptions, PipelinePlan, Waves, plan
from hetctl.methods.pipeline.simulate import simulate_plan, steady_waves
from hetctl.methods.pipeline.sync_cost import LOCAL
from hetctl.model.errors import InfeasibleError


@dataclass(frozen=True)
class PipelineRequest:
    """Input of planning pipelines.

    Parameters
    ----------
    in_flight : int or None
        Minibatches in flight; None: the best number.
    clock_distance : int
        Largest number of waves that a virtual worker may be ahead of the slowest.
    placement : str
        Placement of layers on parameter servers, as in `hetctl.methods.pipeline.sync_cost`.
    """

    layers: Path
    cluster: Path
    policy: str
    in_flight: int | None = None
    clock_distance: int = 0
    placement: str = LOCAL
    plan_seconds: float = 2.0

    @property
    def waves(self) -> Waves:
        """Synchronisation of virtual workers."""
        return Waves(self.clock_distance, self.placement)


def plan_pipeline(request: PipelineRequest) -> PlanOutcome:
    """Plan the virtual workers and their stages.

    Raises
    ------
    BadInputError
        If a file is wrong, or lacks a GPU type.
    InfeasibleError
        If the network does not fit the GPUs' memory.
    """
    layers, cluster, planned = _planned(request)
    return PlanOutcome(
        policy=planned.policy,
        placement=request.placement,
        in_flight=planned.in_flight,
        clock_distance=request.clock_distance,
        bottleneck_s=planned.bottleneck_s,
        lower_bound_s=planned.lower_bound_s,
        ratio=planned.bottleneck_s / planned.lower_bound_s,
        throughput=planned.throughput,
        synchronisation_s=planned.synchronisation_s,
        virtual_workers=outcomes_of(planned, layers, cluster),
    )


def simulate_pipeline(request: PipelineRequest, minibatches: int | None = None) -> SimulationOutcome:
    """Plan, and simulate the plan under a virtual clock; errors are those of `plan_pipeline`.

    Parameters
    ----------
    minibatches : int or None
        Least number of minibatches per virtual worker; None: enough for a steady state.
    """
    layers, cluster, planned = _planned(request)
    run = simulate_plan(planned, layers, cluster, request.waves, _waves(planned, request, minibatches))
    bounds = run.bounds
    return SimulationOutcome(
        policy=planned.policy,
        placement=request.placement,
        in_flight=bounds.in_flight,
        clock_distance=bounds.distance,
        local_staleness=bounds.local_staleness,
        global_staleness=bounds.global_staleness,
        bottleneck_s=planned.bottleneck_s,
        lower_bound_s=planned.lower_bound_s,
        ratio=planned.bottleneck_s / planned.lower_bound_s,
        throughput=run.throughput,
        planned_throughput=planned.throughput,
        efficiency=run.throughput * planned.bottleneck_s / len(planned.virtual_workers),
        synchronisation_s=planned.synchronisation_s,
        minibatches=sum(map(len, run.completed_s)),
        end_s=run.end_s,
        virtual_workers=outcomes_of(planned, layers, cluster, run),
    )


def _waves(planned: PipelinePlan, request: PipelineRequest, minibatches: int | None) -> int:
    if minibatches is None:
        return steady_waves(planned, request.waves)
    return max(2, -(-minibatches // planned.in_flight))


def _planned(request: PipelineRequest) -> tuple[LayerProfile, PipelineCluster, PipelinePlan]:
    file = read_cluster(request.cluster)
    layers, cluster = profile_of(read_layers(request.layers), file), cluster_of(file)
    options = PipelineOptions(request.in_flight, request.plan_seconds, request.waves)
    try:
        return layers, cluster, plan(layers, cluster, request.policy, options)
    except InfeasibleError as error:
        message = f"{file.nodes_place}: nodes: {error.message}; the layers are those of {request.layers}"
        raise InfeasibleError(message, _easier(request, error.hint)) from None


def _easier(request: PipelineRequest, hint: str) -> str:
    """Return further changes that may make a plan possible."""
    wishes = []
    if request.in_flight is not None and request.in_flight > 1:
        wishes.append("lower --in-flight")
    if request.policy != BEST:
        wishes.append(f"take --policy {BEST}")
    return ", ".join([*wishes, hint])
