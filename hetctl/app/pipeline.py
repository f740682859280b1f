"""Simulation of pipelines, from a table of layers and a cluster."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hetctl.app.project import Project
from hetctl.app.run.select_run import known_run
from hetctl.inputs.input_errors import refusal
from hetctl.inputs.layer_profile import ClusterFile, LayerRow, read_cluster, read_layers
from hetctl.methods.pipeline.pipeline_plan import BEST, PipelineOptions, plan
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
from hetctl.methods.pipeline.wsp import Bounds, staleness, violations
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.events import DRIVER
from hetctl.model.pipelines import PipelineLayout, PipelineSimulation, SimulatedWorker, WaveCheck, WaveRecord
from hetctl.model.plan import LOCAL
from hetctl.model.serialization import parse
from hetctl.model.simulation import Simulated
from hetctl.model.site import NodeLinks
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import events_in

LARGER = "use GPUs with more memory, or a smaller minibatch"


def cluster_of(file: ClusterFile) -> PipelineCluster:
    """Return the cluster of a file."""
    return PipelineCluster(
        nodes=file.types_of_nodes,
        memory_bytes={name: kind.memory for name, kind in file.gpu_types.items()},
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
        error = refusal((file.place(("gpu_types", name)), f"gpu_types.{name}: {rule}") for name in missing)
        raise BadInputError(error.message, "give its times over those of the profile: time_ratio: 2.3")
    return ratios


def _used(file: ClusterFile) -> list[str]:
    return sorted({name for node in file.nodes for name in node})


def _refuse_types_without_times(profile: LayerProfile, rows: Sequence[LayerRow], file: ClusterFile) -> None:
    known = ", ".join(sorted(profile.gpu_types))
    lacking = [name for name in _used(file) if name not in profile.gpu_types]
    if lacking:
        rule = f"{rows[0].place.path} has no times on it, only on {known}"
        raise refusal((file.place(("gpu_types", name)), f"gpu_types.{name}: {rule}") for name in lacking)
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
    there = sum(free_bytes[name] for types in file.types_of_nodes for name in types)
    if needed > there:
        raise InfeasibleError(
            f"{file.place(('nodes',))}: nodes: all GPUs together have {there:,} bytes, but the layers of "
            f"{rows[0].place.path} need {needed:,} with one minibatch",
            LARGER,
        )


def simulated_pipelines(
    layer_table: Path,
    cluster: Path,
    policy: str = BEST,
    in_flight: int | None = None,
    clock_distance: int = 0,
    ps_placement: str = LOCAL,
    solver_time_limit_s: float = 2.0,
    minibatches: int | None = None,
) -> Simulated:
    """Plan the virtual workers and their stages, and simulate the plan under a virtual clock.

    Parameters
    ----------
    in_flight : int or None
        Minibatches in flight; None: the best number.
    clock_distance : int
        Largest number of waves that a virtual worker may be ahead of the slowest.
    ps_placement : str
        Placement of layers on parameter servers, as in `hetctl.methods.pipeline.transfers`.
    solver_time_limit_s : float
        Largest search time in seconds.
    minibatches : int or None
        Least number of minibatches per virtual worker; None: enough for a steady state.

    Raises
    ------
    BadInputError
        If a file is wrong, or lacks a GPU type.
    InfeasibleError
        If the network does not fit the GPUs' memory.
    """
    file = read_cluster(cluster)
    layers, nodes = profile_of(read_layers(layer_table), file), cluster_of(file)
    waves = Waves(clock_distance, ps_placement)
    try:
        planned = plan(layers, nodes, policy, PipelineOptions(in_flight, solver_time_limit_s, waves))
    except InfeasibleError as error:
        remedies = ["lower --in-flight"] if in_flight is not None and in_flight > 1 else []
        remedies += [f"take --policy {BEST}"] if policy != BEST else []
        raise InfeasibleError(
            f"{file.place(('nodes',))}: nodes: {error.message}; the layers are those of {layer_table}",
            ", ".join([*remedies, error.hint]),
        ) from None
    workers = planned.virtual_workers
    run = planned.simulated(
        planned.steady_waves if minibatches is None else max(2, -(-minibatches // planned.in_flight))
    )
    servers = server_gpus(workers, layers.parameter_bytes.tolist(), len(nodes.nodes), ps_placement)
    taken = node_bytes(layers, workers, servers, clock_distance)
    result = PipelineSimulation(
        policy=planned.policy,
        ps_placement=ps_placement,
        in_flight=run.bounds.in_flight,
        clock_distance=run.bounds.distance,
        local_staleness=run.bounds.local_staleness,
        global_staleness=run.bounds.global_staleness,
        bottleneck_s=planned.bottleneck_s,
        lower_bound_s=planned.lower_bound_s,
        ratio=planned.bottleneck_s / planned.lower_bound_s,
        throughput=run.throughput,
        planned_throughput=planned.throughput,
        efficiency=run.throughput * planned.bottleneck_s / len(workers),
        synchronisation_s=planned.synchronisation_s,
        waiting_fraction=run.waiting_fraction,
        idle_fraction=run.idle_fraction,
        minibatches=sum(map(len, run.completed_s)),
        end_s=run.end_s,
        node_bytes=tuple(taken.get(node, 0) for node in range(len(nodes.nodes))),
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
            for number, worker in enumerate(workers)
        ),
    )
    return Simulated(result, result)


Layouts = Mapping[int, PipelineLayout]
"""Layouts of a member by round."""


def check_run(project: Project, run: str | None) -> tuple[str, tuple[WaveCheck, ...]]:
    """Return the name of a run, by default the newest, and what the logs of its pipelines say.

    Raises
    ------
    BadInputError
        If it has no logs of pipelines.
    """
    spec = known_run(project, run)[0].spec
    checks = wave_checks(project.home.run(spec.run))
    if not checks:
        raise BadInputError(
            f"no pipeline of run {spec.run} has trained a wave: members are pipelines with --mode pipeline,"
            " or auto",
            "name another run, or wait for its first waves (`hetctl status`)",
        )
    return spec.run, checks


def wave_checks(folder: RunFolder) -> tuple[WaveCheck, ...]:
    """Return a check of each member that trained as a pipeline, for each pair of N_m and D of its layouts."""
    return tuple(
        check
        for member, layouts in _layouts_in(folder).items()
        for check in _checks(member, layouts, read_waves(folder, member))
    )


def _layouts_in(folder: RunFolder) -> Mapping[str, Layouts]:
    layouts: defaultdict[str, dict[int, PipelineLayout]] = defaultdict(dict)
    for event in events_in(folder):
        if event.source == DRIVER and event.kind == "task_started" and event.record.pipeline:
            layouts[event.record.member][event.round] = event.record.pipeline
    return layouts


def _checks(member: str, layouts: Layouts, records: Iterable[WaveRecord]) -> Iterator[WaveCheck]:
    alike: defaultdict[tuple[int, int, bool], list[WaveRecord]] = defaultdict(list)
    for record in records:
        # Without its task the bounds of a record are not known.
        if layout := layouts.get(record.round):
            alike[layout.in_flight, layout.distance, len(layout.workers) > 1].append(record)
    for (in_flight, distance, shares), own in sorted(alike.items()):
        yield _check(member, Bounds(in_flight, distance), own, shares=shares)


def _check(member: str, bounds: Bounds, records: Sequence[WaveRecord], *, shares: bool) -> WaveCheck:
    local, overall = staleness(records, bounds)
    return WaveCheck(
        member=member,
        in_flight=bounds.in_flight,
        distance=bounds.distance,
        minibatches=sum(len(record.completed) for record in records),
        local=local,
        local_bound=bounds.local_staleness,
        overall=overall if shares else None,
        overall_bound=bounds.global_staleness,
        violations=tuple(violations(records, bounds)),
    )


def read_waves(folder: RunFolder, member: str) -> Iterator[WaveRecord]:
    """Yield the records of all ranks of a member; incomplete or corrupt lines are skipped."""
    for log in sorted(folder.waves.glob("*.jsonl")):
        name, _, rank = log.stem.rpartition("-")
        if name == member and rank.isdigit():
            yield from _records_of(log)


def _records_of(log: Path) -> Iterator[WaveRecord]:
    with log.open("rb") as lines:
        for line in lines:
            # A rank that was killed may leave half a line.
            with suppress(ValueError, RecursionError):
                record = parse(WaveRecord, line)
                if len(record.completed) == len(record.pulled):
                    yield record
