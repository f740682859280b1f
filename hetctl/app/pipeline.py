"""Simulation of pipelines, from a table of layers and a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hetctl.inputs.input_errors import refusal
from hetctl.inputs.layer_profile import LayerRow, read_layers
from hetctl.inputs.pipeline_cluster import ClusterFile, read_cluster
from hetctl.methods.pipeline.pipeline_plan import BEST, PipelineOptions, PipelinePlan, plan
from hetctl.methods.pipeline.stage_costs import (
    UNNAMED,
    Layer,
    LayerProfile,
    Links,
    PipelineCluster,
    fit_inter,
    fit_scaling,
    least_bytes,
)
from hetctl.methods.pipeline.stages import node_bytes
from hetctl.methods.pipeline.transfers import Waves, server_gpus
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.pipelines import PipelineSimulation, SimulatedWorker
from hetctl.model.plan import LOCAL
from hetctl.model.simulation import Simulated
from hetctl.model.site import NodeLinks
from hetctl.model.values import dataclass

LARGER = "use GPUs with more memory, or a smaller minibatch"


def cluster_of(file: ClusterFile) -> PipelineCluster:
    """Return the cluster of a file."""
    return PipelineCluster(
        nodes=file.nodes,
        memory_bytes={name: kind.memory_bytes for name, kind in file.gpu_types.items()},
        links=fitted(file.links),
        context_bytes={name: kind.context_bytes for name, kind in file.gpu_types.items()},
        server_bytes_per_s=file.server_bytes_per_s or math.inf,
    )


def fitted(links: NodeLinks) -> Links:
    """Return a model of the links; parameters that are not given are fitted to measurements."""
    intra, inter = links.intra_node, links.inter_node
    scaling = fit_scaling(intra.bytes_per_s, intra.points) if intra.scaling is None else intra.scaling
    if inter.latency_s is None or inter.bytes_per_s is None:
        latency_s, s_per_byte = fit_inter(inter.points)
    else:
        latency_s, s_per_byte = inter.latency_s, 1 / inter.bytes_per_s
    return Links(intra.bytes_per_s, scaling, latency_s, s_per_byte)


def profile_of(rows: Sequence[LayerRow], file: ClusterFile) -> LayerProfile:
    """Return the layers; if their file names no GPU type, with times by the cluster's ratios.

    Raises
    ------
    BadInputError
        If a type of the cluster's GPUs has no ratio or no times, or no layer takes any time on it.
    InfeasibleError
        If a layer does not fit the largest GPU of the nodes, or all layers do not fit all GPUs.
    """
    profile = measured_profile(rows)
    if not any(row.gpu_type for row in rows):
        profile = profile.derived(_time_ratios(file))
    _refuse_types_without_times(profile, rows, file)
    _refuse_too_large(profile, rows, file)
    return profile


def measured_profile(rows: Sequence[LayerRow]) -> LayerProfile:
    """Return the layers with their measurements; under `UNNAMED` if no type of GPU is named."""
    by_layer: dict[str, list[LayerRow]] = {}
    for row in rows:
        by_layer.setdefault(row.layer.name, []).append(row)
    return LayerProfile(tuple(_layer(name, measured) for name, measured in by_layer.items()))


def _layer(name: str, rows: Sequence[LayerRow]) -> Layer:
    first = rows[0].layer
    return Layer(
        name=name,
        forward_s={row.gpu_type or UNNAMED: row.layer.forward_s for row in rows},
        backward_s={row.gpu_type or UNNAMED: row.layer.backward_s for row in rows},
        activation_bytes=first.activation_bytes,
        parameter_bytes=first.parameter_bytes,
        held_bytes=first.held_bytes,
        workspace_bytes=first.workspace_bytes,
        optimizer_bytes=first.optimizer_bytes,
    )


def _time_ratios(file: ClusterFile) -> Mapping[str, float]:
    used = _used(file)
    ratios = {name: ratio for name in used if (ratio := file.gpu_types[name].time_ratio) is not None}
    missing = [name for name in used if name not in ratios]
    if missing:
        rule = "time_ratio is missing, and the layer profile does not say what it was measured on"
        error = refusal((file.gpu_types[name].place, f"gpu_types.{name}: {rule}") for name in missing)
        raise BadInputError(error.message, "give its times over those of the profile: time_ratio: 2.3")
    return ratios


def _used(file: ClusterFile) -> list[str]:
    return sorted({name for types in file.nodes for name in types})


def _refuse_types_without_times(profile: LayerProfile, rows: Sequence[LayerRow], file: ClusterFile) -> None:
    known = ", ".join(sorted(profile.gpu_types))
    lacking = [name for name in _used(file) if name not in profile.gpu_types]
    if lacking:
        rule = f"{rows[0].place.path} has no times on it, only on {known}"
        raise refusal((file.gpu_types[name].place, f"gpu_types.{name}: {rule}") for name in lacking)
    refuse_idle(profile, rows, _used(file))


def refuse_idle(profile: LayerProfile, rows: Sequence[LayerRow], gpu_types: Iterable[str]) -> None:
    """Raise BadInputError if on one of these types no layer takes any time."""
    for name in gpu_types:
        if profile.forward_s(name).sum() + profile.backward_s(name).sum() <= 0:
            raise refusal([(rows[0].place, f"no layer takes any time on {name}")])


def refuse_large_layers(
    profile: LayerProfile, rows: Sequence[LayerRow], memory_bytes: Mapping[str, int]
) -> None:
    """Raise InfeasibleError if a layer needs more memory than the largest GPU has.

    Parameters
    ----------
    memory_bytes : mapping of str to int
        Memory of a GPU in bytes, by type, without the framework's context.
    """
    places = {row.layer.name: row.place for row in reversed(rows)}
    largest = max(memory_bytes, key=lambda name: memory_bytes[name])
    lines = [
        f"{places[layer.name]}: layer '{layer.name}' needs {needed:,} bytes with one minibatch, "
        f"but the largest GPU ({largest or 'the only type'}) has {memory_bytes[largest]:,}"
        for layer, needed in zip(profile.layers, least_bytes(profile) + profile.workspace_bytes, strict=True)
        if needed > memory_bytes[largest]
    ]
    if lines:
        raise InfeasibleError("\n".join(lines), LARGER)


def _refuse_too_large(profile: LayerProfile, rows: Sequence[LayerRow], file: ClusterFile) -> None:
    free_bytes = cluster_of(file).free_bytes
    refuse_large_layers(profile, rows, {name: free_bytes[name] for name in _used(file)})
    needed = int(least_bytes(profile).sum())
    there = sum(free_bytes[name] for types in file.nodes for name in types)
    if needed > there:
        raise InfeasibleError(
            f"{file.nodes_place}: nodes: all GPUs together have {there:,} bytes, but the layers of "
            f"{rows[0].place.path} need {needed:,} with one minibatch",
            LARGER,
        )


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
        Placement of layers on parameter servers, as in `hetctl.methods.pipeline.transfers`.
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
        run = planned.simulated(_waves(planned, self))
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
                        replace(stage, gpu_busy_fraction=share)
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
        return planned.steady_waves
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
