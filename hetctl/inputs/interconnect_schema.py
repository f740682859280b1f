"""Keys of links between GPUs, in site files and in cluster files of pipelines."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from hetctl.inputs.input_errors import shown
from hetctl.inputs.validation import Strict
from hetctl.inputs.yaml_source import Location
from hetctl.model.site import InterNode, IntraNode, NodeLinks


def _points(value: object) -> object:
    """Convert a point given as a list of two numbers, as in YAML."""
    # The models are strict and would refuse YAML's lists where they have tuples.
    if not isinstance(value, list) or not all(isinstance(point, list) for point in value):
        return value
    return tuple(tuple(float(part) if _is_number(part) else part for part in point) for point in value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Positive = Annotated[float, Field(gt=0)]
_POINT: dict[str, Any] = {
    "type": "array",
    "items": {"type": "number", "exclusiveMinimum": 0},
    "minItems": 2,
    "maxItems": 2,
}
Points = Annotated[
    tuple[tuple[Positive, Positive], ...],
    BeforeValidator(_points),
    WithJsonSchema({"type": "array", "items": _POINT}),
]


class IntraNodeModel(Strict):
    """Links between the GPUs of a node: peak bandwidth, with either scaling or points."""

    bytes_per_s: Positive = Field(description="Peak bandwidth in bytes/s.")
    scaling: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Fraction of the peak bandwidth that is reached."
    )
    points: Points = Field(default=(), description="Measured transfers, each as [bytes, seconds].")


class InterNodeModel(Strict):
    """Links between nodes: either latency_s and bytes_per_s, or points."""

    latency_s: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Latency of a message in seconds."
    )
    bytes_per_s: Positive | None = Field(default=None, description="Bandwidth in bytes/s.")
    points: Points = Field(default=(), description="Measured transfers, each as [bytes, seconds].")


class LinksModel(Strict):
    """Links between GPUs, for pipelines."""

    intra_node: IntraNodeModel = Field(description="Links between the GPUs of a node.")
    inter_node: InterNodeModel = Field(description="Links between nodes.")


def links_problems(links: LinksModel) -> list[tuple[Location, str]]:
    """Return the problems of values that are given twice, or not at all."""
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


def links_of(model: LinksModel) -> NodeLinks:
    """Return the links as a value."""
    return NodeLinks(
        IntraNode(**dict(model.intra_node)),
        InterNode(**dict(model.inter_node)),
    )
