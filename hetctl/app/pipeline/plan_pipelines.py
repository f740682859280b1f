"""Plans and simulations of pipelines, as reported by ``hetctl pipeline``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetctl.app.pipeline.inputs import cluster_of, profile_of
from hetctl.inputs.layer_profile import read_layers
from hetctl.inputs.pipeline_cluster import read_cluster
from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.node_memory import node_bytes
from hetctl.methods.pipeline.pipeline_plan import BEST, PipelineOptions, PipelinePlan, Stage, Waves, plan
from hetctl.methods.pipeline.simulate import PipelineRun, simulate_plan, steady_waves
from hetctl.methods.pipeline.sync_cost import server_gpus
from hetctl.model.errors import InfeasibleError
from hetctl.model.plan import LOCAL


@dataclass(frozen=True)
class PipelineRequest:
    """Input of planning pipelines.

    Parameters
    ----------
    in_flight : int or None
        Minibatches in flight; None: the best number.
    clock_distance : int
        Largest number of waves that a virtual worker may be ahead of the slowest.
    ps_placement : str
        Placement of layers on parameter servers, as in `hetctl.methods.pipeline.sync_cost`.
    """

    layer_table: Path
    cluster: Path
    policy: str
    in_flight: int | None = None
    clock_distance: int = 0
    ps_placement: str = LOCAL
    solver_time_limit_s: float = 2.0

    @property
    def waves(self) -> Waves:
        """Synchronisation of virtual workers."""
        return Waves(self.clock_distance, self.ps_placement)


@dataclass(frozen=True)
class StageOutcome:
    """A stage and its use of a GPU; `gpu_busy_fraction` is None without simulation."""

    first: int
    last: int
    first_layer: str
    last_layer: str
    node: int
    gpu: int
    gpu_type: str
    forward_s: float
    backward_s: float
    receive_s: float
    total_s: float
    bytes: int
    memory_bytes: int
    recomputes: bool
    gpu_busy_fraction: float | None = None


@dataclass(frozen=True)
class WorkerOutcome:
    """A virtual worker; `rate` in minibatches/s is None without simulation."""

    in_flight: int
    bottleneck_s: float
    stages: tuple[StageOutcome, ...]
    rate: float | None = None


@dataclass(frozen=True)
class PlanOutcome:
    """A pipeline plan and its predicted rate.

    Parameters
    ----------
    ratio : float
        Ratio of its slowest stage to the lower bound.
    throughput : float
        Rate of all virtual workers in minibatches/s.
    synchronisation_s : float
        Seconds to send a wave's updates and add them, if all virtual workers send at once.
    node_bytes : tuple of int
        Most bytes that minibatches on their way, waves and parameter servers take of the memory of each node.
    """

    policy: str
    ps_placement: str
    in_flight: int
    clock_distance: int
    bottleneck_s: float
    lower_bound_s: float
    ratio: float
    throughput: float
    synchronisation_s: float
    node_bytes: tuple[int, ...]
    virtual_workers: tuple[WorkerOutcome, ...]


@dataclass(frozen=True)
class SimulationOutcome:
    """Simulated run of a pipeline plan.

    Parameters
    ----------
    throughput, planned_throughput : float
        Rates of all virtual workers in minibatches/s.
    efficiency : float
        Ratio of `throughput` to the rate without idle time of the slowest stage.
    synchronisation_s : float
        Seconds to send a wave's updates and add them, if all virtual workers send at once.
    waiting_fraction, idle_fraction : float
        Mean shares of the run in which a virtual worker waits for global weights, and in which none of its
        GPUs has a pass meanwhile.
    minibatches : int
        Minibatches completed by all virtual workers until `end_s`.
    """

    policy: str
    ps_placement: str
    in_flight: int
    clock_distance: int
    local_staleness: int
    global_staleness: int
    bottleneck_s: float
    lower_bound_s: float
    ratio: float
    throughput: float
    planned_throughput: float
    efficiency: float
    synchronisation_s: float
    waiting_fraction: float
    idle_fraction: float
    minibatches: int
    end_s: float
    virtual_workers: tuple[WorkerOutcome, ...]


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
        ps_placement=request.ps_placement,
        in_flight=planned.in_flight,
        clock_distance=request.clock_distance,
        bottleneck_s=planned.bottleneck_s,
        lower_bound_s=planned.lower_bound_s,
        ratio=planned.bottleneck_s / planned.lower_bound_s,
        throughput=planned.throughput,
        synchronisation_s=planned.synchronisation_s,
        node_bytes=_node_bytes(planned, layers, len(cluster.nodes), request.waves),
        virtual_workers=outcomes_of(planned, layers, cluster),
    )


def _node_bytes(planned: PipelinePlan, layers: LayerProfile, nodes: int, waves: Waves) -> tuple[int, ...]:
    """Return the most bytes that a plan takes of the memory of each node."""
    workers = planned.virtual_workers
    servers = server_gpus(workers, layers.parameter_bytes.tolist(), nodes, waves.ps_placement)
    found = node_bytes(layers, workers, servers, waves.distance)
    return tuple(found.get(node, 0) for node in range(nodes))


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
        ps_placement=request.ps_placement,
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
        virtual_workers=outcomes_of(planned, layers, cluster, run),
    )


def _waves(planned: PipelinePlan, request: PipelineRequest, minibatches: int | None) -> int:
    if minibatches is None:
        return steady_waves(planned, request.waves)
    return max(2, -(-minibatches // planned.in_flight))


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


def outcomes_of(
    planned: PipelinePlan, layers: LayerProfile, cluster: PipelineCluster, run: PipelineRun | None = None
) -> tuple[WorkerOutcome, ...]:
    """Return the virtual workers of a plan, with busy fractions if it was simulated."""
    outcomes = []
    for number, worker in enumerate(planned.virtual_workers):
        busy: Sequence[float | None] = run.busy_fractions(number) if run else [None] * len(worker.stages)
        outcomes.append(
            WorkerOutcome(
                in_flight=worker.in_flight,
                bottleneck_s=worker.bottleneck_s,
                stages=tuple(
                    _stage(stage, layers, cluster, share)
                    for stage, share in zip(worker.stages, busy, strict=True)
                ),
                rate=run.rates[number] if run else None,
            )
        )
    return tuple(outcomes)


def _stage(
    stage: Stage, layers: LayerProfile, cluster: PipelineCluster, gpu_busy_fraction: float | None
) -> StageOutcome:
    return StageOutcome(
        first=stage.first,
        last=stage.last,
        first_layer=layers.layers[stage.first].name,
        last_layer=layers.layers[stage.last].name,
        node=stage.node,
        gpu=stage.gpu,
        gpu_type=stage.gpu_type,
        forward_s=stage.forward_s,
        backward_s=stage.backward_s,
        receive_s=stage.receive_s,
        total_s=stage.seconds,
        bytes=stage.bytes,
        memory_bytes=cluster.free_bytes[stage.gpu_type],
        recomputes=stage.recomputes,
        gpu_busy_fraction=gpu_busy_fraction,
    )
