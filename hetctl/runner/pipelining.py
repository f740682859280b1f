"""Pipelines: which layers go to which GPU, and what that comes to under a virtual clock."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetctl.core.errors import InfeasibleError
from hetctl.files.layers import read_layers
from hetctl.files.pipeline_cluster import read_cluster
from hetctl.planners.pipeline.cluster import PipelineCluster
from hetctl.planners.pipeline.layers import LayerProfile
from hetctl.planners.pipeline.plan import BEST, PipelineOptions, PipelinePlan, plan
from hetctl.planners.pipeline.virtual_workers import GROUPINGS
from hetctl.runner.pipeline_inputs import cluster_of, profile_of
from hetctl.runner.pipeline_outcomes import PlanOutcome, SimulationOutcome, outcomes_of
from hetctl.simulator.pipeline_trials import Synchronised
from hetctl.simulator.pipelines import synchronisation_s

LEAST_WAVES = 32
"""Of each virtual worker in a simulation, besides those until its clock distance is used up."""


@dataclass(frozen=True)
class PipelineRequest:
    """What is to be planned.

    Parameters
    ----------
    in_flight : int or None
        Minibatches in flight; None: as many as are best.
    """

    layers: Path
    cluster: Path
    policy: str
    in_flight: int | None = None
    plan_seconds: float = 2.0


@dataclass(frozen=True)
class PipelineWorld:
    """How virtual workers are synchronised in a simulation.

    Parameters
    ----------
    placement : str
        Of layers on parameter servers, as in `hetctl.simulator.pipelines`.
    minibatches : int or None
        That each virtual worker completes at least; None: enough for a steady state.
    """

    clock_distance: int = 0
    placement: str = "local"
    minibatches: int | None = None


def plan_pipeline(request: PipelineRequest) -> PlanOutcome:
    """Plan the virtual workers and their stages.

    Raises
    ------
    BadInputError
        If a file is wrong, or says nothing of some GPU type.
    InfeasibleError
        If the network does not fit the GPUs' memory.
    """
    layers, cluster = _inputs(request)
    planned = _plan(request, request.policy, layers, cluster)
    return PlanOutcome(
        policy=planned.policy,
        in_flight=planned.virtual_workers[0].in_flight,
        bottleneck_s=planned.bottleneck_s,
        lower_bound_s=planned.lower_bound_s,
        ratio=planned.bottleneck_s / planned.lower_bound_s,
        throughput=planned.throughput,
        virtual_workers=outcomes_of(planned, layers, cluster),
    )


def simulate_pipeline(request: PipelineRequest, world: PipelineWorld) -> SimulationOutcome:
    """Plan, and run the plan under a virtual clock; errors are those of `plan_pipeline`.

    If nothing is said of it, there are as many minibatches in flight as keep the pipelines busy. ``best``
    is then the fastest of all policies in the simulation, where waves take time to send.
    """
    layers, cluster = _inputs(request)
    setting = Synchronised(layers, cluster, world.clock_distance, world.placement)
    planned = setting.fastest(_candidates(request, setting))
    run = setting.run(planned, _waves(planned, world))
    bounds = run.bounds
    return SimulationOutcome(
        policy=request.policy,
        chosen=planned.policy,
        placement=world.placement,
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
        synchronisation_s=synchronisation_s(planned.virtual_workers, layers, cluster, world.placement),
        minibatches=sum(map(len, run.completed_s)),
        end_s=run.end_s,
        virtual_workers=outcomes_of(planned, layers, cluster, run),
    )


def _candidates(request: PipelineRequest, setting: Synchronised) -> list[PipelinePlan]:
    """Return the plan of a policy; for ``best`` those of the others, too, as far as there are any."""
    found = [_plan(request, request.policy, setting.layers, setting.cluster)]
    for policy in GROUPINGS if request.policy == BEST else ():
        with suppress(InfeasibleError):
            found.append(_plan(request, policy, setting.layers, setting.cluster))
    return found if request.in_flight else [setting.deepened(one) for one in found]


def _waves(planned: PipelinePlan, world: PipelineWorld) -> int:
    if world.minibatches is None:
        return LEAST_WAVES + 4 * world.clock_distance
    return max(2, -(-world.minibatches // planned.virtual_workers[0].in_flight))


def _inputs(request: PipelineRequest) -> tuple[LayerProfile, PipelineCluster]:
    file = read_cluster(request.cluster)
    return profile_of(read_layers(request.layers), file), cluster_of(file)


def _plan(
    request: PipelineRequest, policy: str, layers: LayerProfile, cluster: PipelineCluster
) -> PipelinePlan:
    options = PipelineOptions(in_flight=request.in_flight, seconds=request.plan_seconds)
    return plan(layers, cluster, policy, options)
