"""Clusters for pipelines: a YAML file of GPU types, nodes, and measurements of the links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from hetctl.inputs.input_errors import SourceLine, suggestion
from hetctl.inputs.quantities import parse_bytes
from hetctl.inputs.site_file import links_problems
from hetctl.inputs.validation import Matching, Strict, converting, model_of, validate, value_of
from hetctl.inputs.yaml_source import Location, read_yaml
from hetctl.model.site import NodeLinks
from hetctl.model.values import dataclass


@dataclass(frozen=True)
class GpuType:
    """Type of GPU.

    Parameters
    ----------
    time_ratio : float or None
        Ratio of its times to those of a layer profile that names no GPU type.
    context_bytes : int
        Memory that the framework takes before it holds any layer.
    """

    place: SourceLine
    memory_bytes: int
    time_ratio: float | None
    context_bytes: int = 0


@dataclass(frozen=True)
class ClusterFile:
    """Content of a cluster file.

    Parameters
    ----------
    nodes : tuple of tuple of str
        GPU type of each GPU of each node.
    nodes_place : SourceLine
        Line at which the nodes begin.
    server_bytes_per_s : float or None
        Bytes of updates that a parameter server adds per second; None: adding takes no time.
    """

    nodes_place: SourceLine
    gpu_types: Mapping[str, GpuType]
    nodes: tuple[tuple[str, ...], ...]
    links: NodeLinks
    server_bytes_per_s: float | None = None


def read_cluster(path: Path) -> ClusterFile:
    """Read a cluster file.

    Raises
    ------
    BadInputError
        If the file has errors, with a line for each: ``FILE:LINE: key: rule``.
    """
    source = read_yaml(path)
    model = validate(_ClusterModel, source)
    links = value_of(NodeLinks, model.links)
    if problems := [*_type_problems(model), *links_problems(links)]:
        raise source.refusal(problems)
    return ClusterFile(
        nodes_place=source.place(("nodes",)),
        gpu_types={
            name: GpuType(source.place(("gpu_types", name)), kind.memory, kind.time_ratio, kind.context_bytes)
            for name, kind in model.gpu_types.items()
        },
        nodes=tuple(
            tuple(name for name, count in node.items() for _ in range(count)) for node in model.nodes
        ),
        links=links,
        server_bytes_per_s=model.server_bytes_per_s,
    )


def _size(value: Any) -> int:
    return 0 if value == 0 else parse_bytes(value)


TypeName = Annotated[str, Matching(r"[!-~]([ -~]*[!-~])?", "must be one line of plain text")]


Positive = Annotated[float, Field(gt=0)]
if TYPE_CHECKING:
    _Links = Strict
else:
    _Links = model_of(NodeLinks)


class _GpuTypeModel(Strict):
    memory: Annotated[int, converting(parse_bytes)]
    time_ratio: Positive | None = None
    context_bytes: Annotated[int, converting(_size)] = 0


class _ClusterModel(Strict):
    gpu_types: Annotated[dict[TypeName, _GpuTypeModel], Field(min_length=1)]
    nodes: Annotated[
        list[Annotated[dict[str, Annotated[int, Field(ge=1, le=1024)]], Field(min_length=1)]],
        Field(min_length=1),
    ]
    links: _Links
    server_bytes_per_s: Positive | None = None


def _type_problems(model: _ClusterModel) -> Iterator[tuple[Location, str]]:
    for name, kind in model.gpu_types.items():
        if kind.context_bytes >= kind.memory:
            rule = f"must be less than memory ({kind.memory:,} bytes)"
            yield ("gpu_types", name, "context_bytes"), rule
    for index, node in enumerate(model.nodes):
        for name in node.keys() - model.gpu_types.keys():
            yield ("nodes", index, name), f"must be one of gpu_types{suggestion(name, model.gpu_types)}"
