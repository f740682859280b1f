"""Input of pipeline planning, from layer and cluster files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from hetctl.inputs.input_errors import refusal
from hetctl.inputs.layer_profile import LayerRow
from hetctl.inputs.pipeline_cluster import ClusterFile
from hetctl.methods.pipeline.gpu_cluster import Links, PipelineCluster, fit_inter, fit_scaling
from hetctl.methods.pipeline.layers import UNNAMED, Layer, LayerProfile
from hetctl.methods.pipeline.stage_costs import least_bytes
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.site import NodeLinks

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
