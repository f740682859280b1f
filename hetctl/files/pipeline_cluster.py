"""Clusters for pipelines: a YAML file of GPU types, nodes, and what was measured of the links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from hetctl.core.errors import BadInputError
from hetctl.files.durations import parse_bytes
from hetctl.files.refusal import Place, shown, suggestion
from hetctl.files.validation import Matching, Strict, validate
from hetctl.files.yaml_source import Location, YamlSource, read_yaml

Point = tuple[float, float]
"""Bytes, and the seconds that they took."""


@dataclass(frozen=True)
class GpuType:
    """A type of GPU.

    Parameters
    ----------
    time_ratio : float or None
        Its times over those of a layer profile that names no GPU type.
    """

    place: Place
    memory_bytes: int
    time_ratio: float | None


@dataclass(frozen=True)
class IntraNode:
    """Links within a node: peak bandwidth, and the part of it that is reached or what was measured."""

    bytes_per_s: float
    scaling: float | None
    points: tuple[Point, ...]


@dataclass(frozen=True)
class InterNode:
    """Links between nodes: latency and bandwidth, or what was measured."""

    latency_s: float | None
    bytes_per_s: float | None
    points: tuple[Point, ...]


@dataclass(frozen=True)
class ClusterFile:
    """What a cluster file says.

    Parameters
    ----------
    nodes : tuple of tuple of str
        The type of each GPU of each node.
    nodes_place : Place
        Where the nodes begin.
    """

    nodes_place: Place
    gpu_types: Mapping[str, GpuType]
    nodes: tuple[tuple[str, ...], ...]
    intra: IntraNode
    inter: InterNode


def read_cluster(path: Path) -> ClusterFile:
    """Read a cluster file.

    Raises
    ------
    BadInputError
        If anything in it is wrong, with a line for each problem: ``FILE:LINE: key: rule``.
    """
    source = read_yaml(path)
    model = validate(_ClusterModel, source)
    problems = [*_unknown_types(model), *_link_problems(model.links)]
    if problems:
        raise source.refusal(problems)
    return _cluster(source, model)


def _size(value: object) -> int:
    try:
        return parse_bytes(value)  # type: ignore[arg-type]
    except BadInputError as error:
        raise ValueError(error.message) from None


def _points(value: object) -> object:
    """Take a point as a list of two numbers, as YAML has it."""
    if not isinstance(value, list) or not all(isinstance(point, list) for point in value):
        return value
    return tuple(tuple(float(part) if _is_number(part) else part for part in point) for point in value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Positive = Annotated[float, Field(gt=0)]
Points = Annotated[tuple[tuple[Positive, Positive], ...], BeforeValidator(_points)]
TypeName = Annotated[str, Matching(r"[!-~]([ -~]*[!-~])?", "must be one line of plain text")]


class _GpuTypeModel(Strict):
    memory: Annotated[int, BeforeValidator(_size)]
    time_ratio: Positive | None = None


class _IntraModel(Strict):
    bytes_per_s: Positive
    scaling: Annotated[float, Field(gt=0, le=1)] | None = None
    points: Points = ()


class _InterModel(Strict):
    latency_s: Annotated[float, Field(ge=0)] | None = None
    bytes_per_s: Positive | None = None
    points: Points = ()


class _LinksModel(Strict):
    intra_node: _IntraModel
    inter_node: _InterModel


class _ClusterModel(Strict):
    gpu_types: Annotated[dict[TypeName, _GpuTypeModel], Field(min_length=1)]
    nodes: Annotated[
        list[Annotated[dict[str, Annotated[int, Field(ge=1, le=1024)]], Field(min_length=1)]],
        Field(min_length=1),
    ]
    links: _LinksModel


def _unknown_types(model: _ClusterModel) -> list[tuple[Location, str]]:
    return [
        (("nodes", index, name), f"is no gpu_type of this file{suggestion(name, model.gpu_types)}")
        for index, node in enumerate(model.nodes)
        for name in node
        if name not in model.gpu_types
    ]


def _link_problems(links: _LinksModel) -> list[tuple[Location, str]]:
    intra, inter = links.intra_node, links.inter_node
    line = [value for value in (inter.latency_s, inter.bytes_per_s) if value is not None]
    problems: list[tuple[Location, str]] = []
    if (intra.scaling is None) == (not intra.points):
        problems.append((("links", "intra_node"), "must have either scaling or points"))
    if bool(line) == bool(inter.points) or (line and len(line) < 2):
        problems.append((("links", "inter_node"), "must have either latency_s and bytes_per_s, or points"))
    sizes = {size for size, _ in inter.points}
    if len(sizes) == 1:
        rule = f"must be of at least two sizes, got only {shown(sizes.pop())} bytes"
        problems.append((("links", "inter_node", "points"), rule))
    return problems


def _cluster(source: YamlSource, model: _ClusterModel) -> ClusterFile:
    intra, inter = model.links.intra_node, model.links.inter_node
    return ClusterFile(
        nodes_place=source.place(("nodes",)),
        gpu_types={
            name: GpuType(source.place(("gpu_types", name)), kind.memory, kind.time_ratio)
            for name, kind in model.gpu_types.items()
        },
        nodes=tuple(
            tuple(name for name, count in node.items() for _ in range(count)) for node in model.nodes
        ),
        intra=IntraNode(intra.bytes_per_s, intra.scaling, intra.points),
        inter=InterNode(inter.latency_s, inter.bytes_per_s, inter.points),
    )
