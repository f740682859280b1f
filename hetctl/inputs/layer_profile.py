"""Layer profiles: CSV with a row for each layer and GPU type, or PipeDream's graph text; and clusters.

A graph has a line for each node with its profile, then a line for each edge. It becomes a chain in which each
node is a layer: a topological order that finishes one branch before it begins the next. The bytes at a cut
are the sum of all outputs needed after it, so that a skip connection counts at every cut that it spans. A
coarser chain, with branches merged into single layers, has no cut that is not included here.
"""

from __future__ import annotations

import csv
import graphlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO

from hetctl.inputs.csv_table import NUMBER, TEXT, Problem, number, read_table, repeated, whole_number
from hetctl.inputs.input_errors import SourceLine, read_text, refusal, refuse, shown, suggestion
from hetctl.inputs.quantities import parse_bytes
from hetctl.inputs.site_file import links_problems
from hetctl.inputs.validation import converting, model_of, validate, value_of
from hetctl.inputs.yaml_source import Location, dotted, read_yaml
from hetctl.model.file_keys import Bytes, Key, Limits, Pattern
from hetctl.model.profile import MeasuredLayer
from hetctl.model.site import NodeLinks
from hetctl.model.values import dataclass

NODE = re.compile(r"(\S+) -- (.*?) -- ([a-z_]+=.*)")
EDGE = re.compile(r"(\S+) -- (\S+)")
VALUES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
INPUT = "Input"
IN_PLACE = "inplace"
MOST_BYTES = 1e15

Edges = Mapping[tuple[str, str], SourceLine]


class GraphNode(NamedTuple):
    """Operation as profiled with one minibatch; as a layer its activations are its output alone."""

    place: SourceLine
    is_input: bool
    layer: MeasuredLayer


def layers_of(path: Path, text: str) -> list[LayerRow]:
    """Return the nodes of a graph as a chain, with the bytes that are transferred at a cut after each.

    Inputs are omitted, as in PipeDream: they are read on the GPU of the first layer.

    Raises
    ------
    BadInputError
        If a line is neither node nor edge, a value is invalid, or the edges form a cycle.
    """
    nodes, edges = _parsed(path, text)
    _refuse_cycles(path, nodes, edges)
    order = [name for name in _topological(nodes, edges) if not nodes[name].is_input]
    if not order:
        raise refusal([(SourceLine(path, 1), "has no layers")])
    return [
        LayerRow(nodes[name].place, None, replace(nodes[name].layer, activation_bytes=crossing))
        for name, crossing in zip(order, _crossing(order, nodes, edges), strict=True)
    ]


def _parsed(path: Path, text: str) -> tuple[dict[str, GraphNode], dict[tuple[str, str], SourceLine]]:
    nodes: dict[str, GraphNode] = {}
    edges: dict[tuple[str, str], SourceLine] = {}
    problems: list[Problem] = []
    numbered = ((SourceLine(path, at), line.strip()) for at, line in enumerate(text.splitlines(), start=1))
    for place, line in numbered:
        if not line:
            continue
        if found := NODE.fullmatch(line):
            name, description, values = found.groups()
            if name in nodes:
                problems.append((place, f"node {name} is already in line {nodes[name].place.line}"))
            node, rules = _node(place, name, description, values)
            nodes.setdefault(name, node)
            problems += [(place, rule) for rule in rules]
        elif found := EDGE.fullmatch(line):
            edges.setdefault((found[1], found[2]), place)
        else:
            problems.append((place, f"is neither NODE -- WHAT -- VALUES nor NODE -- NODE, got {shown(line)}"))
    problems += [
        (place, f"edge names node {shown(name)}, which has no line of its own")
        for edge, place in edges.items()
        for name in dict.fromkeys(edge)
        if name not in nodes
    ]
    refuse(problems)
    return nodes, edges


def _node(place: SourceLine, name: str, description: str, values: str) -> tuple[GraphNode, list[str]]:
    """Return the node, with 0 for invalid values, and the violated rules."""
    pairs = dict(part.split("=", 1) for part in re.split(r", | -- ", values) if "=" in part)
    rules = [f"{key} is missing" for key in VALUES if key not in pairs]
    found = {key: _number(pairs[key]) for key in VALUES if key in pairs}
    rules += [
        f"{key}: must be a number from 0 to 1e15, got {shown(pairs[key])}"
        for key, number in found.items()
        if number is None
    ]
    forward_ms, backward_ms, activation, parameters = (found.get(key) or 0.0 for key in VALUES)
    layer = MeasuredLayer(
        name=f"{name} {description.partition('(')[0]}".strip(),
        forward_s=forward_ms / 1000,
        backward_s=backward_ms / 1000,
        activation_bytes=round(activation),
        parameter_bytes=round(parameters),
        # An in-place operation needs no data of its own for the backward pass.
        held_bytes=0 if IN_PLACE in description else round(activation),
    )
    return GraphNode(place, description == INPUT, layer), rules


def _number(text: str) -> float | None:
    """Return a number, or the sum of several in ``[1.0; 2.0]``; None if it is invalid."""
    parts = text.strip("[]").split(";") if text.startswith("[") else [text]
    numbers = [float(part) if NUMBER.fullmatch(part.strip()) else math.nan for part in parts]
    # NaN marks an invalid part and fails this comparison.
    return math.fsum(numbers) if all(0 <= number <= MOST_BYTES for number in numbers) else None


def _refuse_cycles(path: Path, nodes: Mapping[str, GraphNode], edges: Edges) -> None:
    sorter = graphlib.TopologicalSorter({name: [] for name in nodes})
    for before, after in edges:
        sorter.add(after, before)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        cycle: Sequence[str] = error.args[1]
        places = [edges[edge] for edge in pairwise(cycle) if edge in edges]
        around = " -- ".join(cycle) if len(cycle) <= 8 else " -- ".join([*cycle[:4], "...", *cycle[-3:]])
        place = max(places, default=SourceLine(path, 1))
        raise refusal([(place, f"edge closes a cycle: {around}; layers must have an order")]) from None


def _topological(nodes: Mapping[str, GraphNode], edges: Edges) -> list[str]:
    """Return the nodes in depth-first topological order; among several candidates, the first in the file."""
    after: dict[str, list[str]] = {name: [] for name in nodes}
    waits = dict.fromkeys(nodes, 0)
    for first, second in edges:
        after[first].append(second)
        waits[second] += 1
    line = {name: node.place.line for name, node in nodes.items()}
    ready = sorted((name for name in nodes if not waits[name]), key=line.__getitem__, reverse=True)
    order = []
    while ready:
        order.append(ready.pop())
        freed = []
        for name in after[order[-1]]:
            waits[name] -= 1
            if not waits[name]:
                freed.append(name)
        ready += sorted(freed, key=line.__getitem__, reverse=True)
    return order


def _crossing(order: Sequence[str], nodes: Mapping[str, GraphNode], edges: Edges) -> list[int]:
    """Return the bytes transferred at a cut after each node of the order; for the last node, its output."""
    at = {name: position for position, name in enumerate(order)}
    last_use = dict.fromkeys(order, -1)
    for first, second in edges:
        if first in at:
            last_use[first] = max(last_use[first], at[second])
    changes = [0] * (len(order) + 1)
    for name, use in last_use.items():
        if use >= 0:
            changes[at[name]] += nodes[name].layer.activation_bytes
            changes[use] -= nodes[name].layer.activation_bytes
    crossing, total = [], 0
    for change in changes[: len(order)]:
        total += change
        crossing.append(total)
    crossing[-1] = nodes[order[-1]].layer.activation_bytes
    return crossing


SECONDS = number(0.0, sys.float_info.max, "must be a number of seconds, at least 0")
SIZE = whole_number(0, "must be a whole number from 0 to 999,999,999,999,999", digits=15)
TIMES, BYTES = ("forward_s", "backward_s"), ("activation_bytes", "parameter_bytes")
OPTIONAL_BYTES = ("held_bytes", "workspace_bytes", "optimizer_bytes")
NEEDED = {"layer": TEXT, **dict.fromkeys(TIMES, SECONDS), **dict.fromkeys(BYTES, SIZE)}
OPTIONAL = {"gpu_type": TEXT, **dict.fromkeys(OPTIONAL_BYTES, SIZE)}
SAME_ON_ALL_TYPES = (*BYTES, *OPTIONAL_BYTES)


@dataclass(frozen=True)
class LayerRow:
    """Layer on one type of GPU.

    Parameters
    ----------
    gpu_type : str or None
        GPU type; None in a profile that does not name it.
    """

    place: SourceLine
    gpu_type: str | None
    layer: MeasuredLayer


def read_layers(path: Path) -> list[LayerRow]:
    """Read a layer profile; the layers are returned in the order of computation.

    Raises
    ------
    BadInputError
        If the file has errors, with a line for each: ``FILE:LINE: rule``. Graphs must have no cycle; all
        layers must have rows for the same GPU types.
    """
    text = read_text(path)
    if " -- " in text.lstrip().partition("\n")[0]:
        return layers_of(path, text)
    records, problems = read_table(path, NEEDED, OPTIONAL, text)
    rows = [_row(place, values) for place, values in records]
    refuse(problems or [*_contradictions(rows)] or _gaps(rows))
    return rows


def write_layers(rows: Iterable[LayerRow], file: TextIO) -> None:
    """Write a CSV table from which `read_layers` returns the same rows."""
    writer = csv.writer(file, lineterminator="\n")
    columns = (*TIMES, *BYTES, *OPTIONAL_BYTES)
    writer.writerow(("layer", "gpu_type", *columns))
    writer.writerows(
        [row.layer.name, row.gpu_type, *(getattr(row.layer, name) for name in columns)] for row in rows
    )


def _row(place: SourceLine, values: dict[str, Any]) -> LayerRow:
    gpu_type, workspace = values.pop("gpu_type"), values.pop("workspace_bytes") or 0
    return LayerRow(place, gpu_type, MeasuredLayer(values.pop("layer"), workspace_bytes=workspace, **values))


def _contradictions(rows: list[LayerRow]) -> Iterator[Problem]:
    at = {row.place: row for row in rows}
    for place, earlier in repeated((row.place, (row.layer.name, row.gpu_type)) for row in rows):
        on = f" on {at[place].gpu_type}" if at[place].gpu_type else ""
        yield place, f"layer '{at[place].layer.name}'{on} is already in line {earlier.line}"
    for place, first in repeated((row.place, row.layer.name) for row in rows):
        layer = at[place].layer
        for name in SAME_ON_ALL_TYPES:
            if getattr(layer, name) != getattr(at[first].layer, name):
                rule = f"must be the same in all rows of layer '{layer.name}', as in line {first.line}"
                yield place, f"{name}: {rule}"


def _gaps(rows: list[LayerRow]) -> list[Problem]:
    """Find layers that lack a GPU type which another layer has."""
    found = {(row.layer.name, row.gpu_type) for row in rows}
    firsts = {row.layer.name: row.place for row in reversed(rows)}
    return [
        (place, f"layer '{layer}' has no row for gpu_type {gpu_type or '(empty)'}, others have")
        for layer, place in firsts.items()
        for gpu_type in sorted({row.gpu_type for row in rows}, key=str)
        if (layer, gpu_type) not in found
    ]


def _size(value: Any) -> int:
    return 0 if value == 0 else parse_bytes(value)


TypeName = Annotated[str, Pattern(r"[!-~]([ -~]*[!-~])?", "must be one line of plain text")]
NodeGpus = Annotated[Mapping[str, Annotated[int, Limits(ge=1, le=1024)]], Limits(min_length=1)]


@dataclass(frozen=True)
class GpuType:
    """Type of GPU."""

    memory: Annotated[Bytes, Key("Memory of a GPU.")]
    time_ratio: Annotated[
        float | None, Key("Ratio of its times to those of a layer profile that names no GPU type.", gt=0)
    ] = None
    context_bytes: Annotated[
        int, converting(_size), Key("Memory that the framework takes before it holds any layer.")
    ] = 0


@dataclass(frozen=True)
class ClusterFile:
    """Content of a cluster file.

    Parameters
    ----------
    place : callable
        Function that returns the line of a key.
    """

    gpu_types: Annotated[Mapping[TypeName, GpuType], Key("Types of GPUs by their names.", min_length=1)]
    nodes: Annotated[tuple[NodeGpus, ...], Key("Numbers of GPUs by type, for each node.", min_length=1)]
    links: Annotated[NodeLinks, Key("Links between GPUs.")]
    server_bytes_per_s: Annotated[
        float | None,
        Key("Bytes of updates that a parameter server adds per second; null: adding takes no time.", gt=0),
    ] = None
    place: Callable[[Location], SourceLine] = lambda at: SourceLine(Path(dotted(at)), 1)

    @property
    def types_of_nodes(self) -> tuple[tuple[str, ...], ...]:
        """GPU type of each GPU of each node."""
        return tuple(tuple(name for name, count in node.items() for _ in range(count)) for node in self.nodes)


def read_cluster(path: Path) -> ClusterFile:
    """Read a cluster file.

    Raises
    ------
    BadInputError
        If the file has errors, with a line for each: ``FILE:LINE: key: rule``.
    """
    source = read_yaml(path)
    file = replace(value_of(ClusterFile, validate(model_of(ClusterFile), source)), place=source.place)
    if problems := [*_type_problems(file), *links_problems(file.links)]:
        raise source.refusal(problems)
    return file


def _type_problems(file: ClusterFile) -> Iterator[tuple[Location, str]]:
    for name, kind in file.gpu_types.items():
        if kind.context_bytes >= kind.memory:
            rule = f"must be less than memory ({kind.memory:,} bytes)"
            yield ("gpu_types", name, "context_bytes"), rule
    for index, node in enumerate(file.nodes):
        for name in node.keys() - file.gpu_types.keys():
            yield ("nodes", index, name), f"must be one of gpu_types{suggestion(name, file.gpu_types)}"
