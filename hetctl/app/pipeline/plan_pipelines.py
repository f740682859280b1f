"""Simulation of pipelines, from a table of layers and a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetctl.app.pipeline.inputs import cluster_of, profile_of
from hetctl.inputs.layer_profile import read_layers
from hetctl.inputs.pipeline_cluster import read_cluster
from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.node_memory import node_bytes
from hetctl.methods.pipeline.pipeline_plan import BEST, PipelineOptions, PipelinePlan, Waves, plan
from hetctl.methods.pipeline.simulate import simulate_plan, steady_waves
from hetctl.methods.pipeline.sync_cost import server_gpus
from hetctl.model.errors import InfeasibleError
from hetctl.model.pipelines import PipelineSimulation, SimulatedStage, SimulatedWorker, Stage
from hetctl.model.plan import LOCAL
from hetctl.model.simulation import Simulated


@dataclass(frozen=True)
class PipelineRequest:
    """Input of a simulation of pipelines.

    Parameters
    ----------
    in_flight : int or None
        Minibatches in flight; None: the best number.
    clock_distance : int
        Largest number of waves that a virtual worker may be ahead of the slowest.
    ps_placement : str
        Placement of layers on parameter servers, as in `hetctl.methods.pipeline.sync_cost`.
    minibatches : int or None
        Least number of minibatches per virtual worker; None: enough for a steady state.
    """

    layer_table: Path
    cluster: Path
    policy: str = BEST
    in_flight: int | None = None
    clock_distance: int = 0
    ps_placement: str = LOCAL
    solver_time_limit_s: float = 2.0
    minibatches: int | None = None

    @property
    def waves(self) -> Waves:
        """Synchronisation of virtual workers."""
        return Waves(self.clock_distance, self.ps_placement)

    def simulated(self) -> Simulated:
        """Plan the virtual workers and their stages, and simulate the plan under a virtual clock.

        Raises
        ------
        BadInputError
            If a file is wrong, or lacks a GPU type.
        InfeasibleError
            If the network does not fit the GPUs' memory.
        """
        layers, cluster, planned = _planned(self)
        run = simulate_plan(planned, layers, cluster, self.waves, _waves(planned, self))
        bounds = run.bounds
        result = PipelineSimulation(
            policy=planned.policy,
            ps_placement=self.ps_placement,
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
            waiting_fraction=run.waiting_fraction,
            idle_fraction=run.idle_fraction,
            minibatches=sum(map(len, run.completed_s)),
            end_s=run.end_s,
            node_bytes=_node_bytes(planned, layers, len(cluster.nodes), self.waves),
            virtual_workers=tuple(
                SimulatedWorker(
                    in_flight=worker.in_flight,
                    bottleneck_s=worker.bottleneck_s,
                    stages=tuple(
                        _stage(stage, layers, cluster, share)
                        for stage, share in zip(worker.stages, run.busy_fractions(number), strict=True)
                    ),
                    rate=run.rates[number],
                )
                for number, worker in enumerate(planned.virtual_workers)
            ),
        )
        return Simulated(result, result)


def _node_bytes(planned: PipelinePlan, layers: LayerProfile, nodes: int, waves: Waves) -> tuple[int, ...]:
    """Return the most bytes that a plan takes of the memory of each node."""
    workers = planned.virtual_workers
    servers = server_gpus(workers, layers.parameter_bytes.tolist(), nodes, waves.ps_placement)
    found = node_bytes(layers, workers, servers, waves.distance)
    return tuple(found.get(node, 0) for node in range(nodes))


def _waves(planned: PipelinePlan, request: PipelineRequest) -> int:
    if request.minibatches is None:
        return steady_waves(planned, request.waves)
    return max(2, -(-request.minibatches // planned.in_flight))


def _planned(request: PipelineRequest) -> tuple[LayerProfile, PipelineCluster, PipelinePlan]:
    file = read_cluster(request.cluster)
    layers, cluster = profile_of(read_layers(request.layer_table), file), cluster_of(file)
    options = PipelineOptions(request.in_flight, request.solver_time_limit_s, request.waves)
    try:
        return layers, cluster, plan(layers, cluster, request.policy, options)
    except InfeasibleError as error:
        message = f"{file.nodes_place}: nodes: {error.message}; the layers are those of {request.layer_table}"
        raise InfeasibleError(message, _easier(request, error.hint)) from None


def _easier(request: PipelineRequest, hint: str) -> str:
    """Return further changes that may make a plan possible."""
    remedies = []
    if request.in_flight is not None and request.in_flight > 1:
        remedies.append("lower --in-flight")
    if request.policy != BEST:
        remedies.append(f"take --policy {BEST}")
    return ", ".join([*remedies, hint])


def _stage(
    stage: Stage, layers: LayerProfile, cluster: PipelineCluster, gpu_busy_fraction: float
) -> SimulatedStage:
    return SimulatedStage(
        **vars(stage),
        first_layer=layers.layers[stage.first].name,
        last_layer=layers.layers[stage.last].name,
        total_s=stage.seconds,
        memory_bytes=cluster.free_bytes[stage.gpu_type],
        gpu_busy_fraction=gpu_busy_fraction,
    )
