"""Layer profiles: CSV with a row for each layer and GPU type, or PipeDream's graph text."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hetctl.inputs.csv_table import NUMBER, CsvRow, Problem, records_in
from hetctl.inputs.input_errors import SourceLine, read_text, refusal, shown
from hetctl.inputs.pipedream import is_graph, layers_of
from hetctl.model.profile import MeasuredLayer

TIMES, BYTES = ("forward_s", "backward_s"), ("activation_bytes", "parameter_bytes")
REQUIRED = ("layer", *TIMES, *BYTES)
OPTIONAL_BYTES = ("held_bytes", "workspace_bytes", "optimizer_bytes")
OPTIONAL = ("gpu_type", *OPTIONAL_BYTES)
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
    if is_graph(text):
        return [
            LayerRow(
                node.place,
                gpu_type=None,
                layer=MeasuredLayer(
                    name=node.title,
                    forward_s=node.forward_s,
                    backward_s=node.backward_s,
                    activation_bytes=crossing,
                    parameter_bytes=node.parameter_bytes,
                    held_bytes=node.held_bytes,
                ),
            )
            for node, crossing in layers_of(path, text)
        ]
    rows = _table(path, text)
    problems = _contradictions(rows) or _gaps(rows)
    if problems:
        raise refusal(problems)
    return rows


def write_layers(rows: Iterable[LayerRow], file: TextIO) -> None:
    """Write a CSV table from which `read_layers` returns the same rows."""
    writer = csv.writer(file, lineterminator="\n")
    columns = (*TIMES, *BYTES, *OPTIONAL_BYTES)
    writer.writerow(("layer", "gpu_type", *columns))
    writer.writerows(
        [row.layer.name, row.gpu_type, *(getattr(row.layer, name) for name in columns)] for row in rows
    )


def _table(path: Path, text: str) -> list[LayerRow]:
    records, problems = records_in(path, text, REQUIRED, OPTIONAL)
    problems += [problem for record in records for problem in _problems(record)]
    if problems:
        raise refusal(problems)
    return [_row(record) for record in records]


def _problems(record: CsvRow) -> list[Problem]:
    return [
        (record.place, f"{name}: {rule}, got {shown(record.cells[name])}")
        for name, rule in _broken(record.cells)
    ]


def _row(record: CsvRow) -> LayerRow:
    cells = record.cells
    layer = MeasuredLayer(
        name=cells["layer"],
        forward_s=float(cells["forward_s"]),
        backward_s=float(cells["backward_s"]),
        activation_bytes=int(cells["activation_bytes"]),
        parameter_bytes=int(cells["parameter_bytes"]),
        held_bytes=_size(cells.get("held_bytes")),
        workspace_bytes=_size(cells.get("workspace_bytes")) or 0,
        optimizer_bytes=_size(cells.get("optimizer_bytes")),
    )
    return LayerRow(record.place, cells.get("gpu_type") or None, layer)


def _size(text: str | None) -> int | None:
    return int(text) if text else None


def _broken(row: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the columns whose values break their rule, with the rule."""
    broken = [
        (name, "must be one line of text")
        for name in ("layer", "gpu_type")
        if not row.get(name, "").isprintable()
    ]
    if not row["layer"]:
        broken.append(("layer", "must not be empty"))
    broken += [(name, "must be a number of seconds, at least 0") for name in TIMES if not _is_time(row[name])]
    sizes = [name for name in SAME_ON_ALL_TYPES if name in row and (row[name] or name in BYTES)]
    broken += [
        (name, "must be a whole number from 0 to 999,999,999,999,999")
        for name in sizes
        if not _is_size(row[name])
    ]
    return broken


def _is_time(text: str) -> bool:
    return NUMBER.fullmatch(text) is not None and 0 <= float(text) < math.inf


def _is_size(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,15}", text) is not None


def _contradictions(rows: list[LayerRow]) -> list[tuple[SourceLine, str]]:
    points: dict[tuple[str, str | None], LayerRow] = {}
    firsts: dict[str, LayerRow] = {}
    problems = []
    for row in rows:
        layer = row.layer.name
        earlier = points.setdefault((layer, row.gpu_type), row)
        if earlier is not row:
            on = f" on {row.gpu_type}" if row.gpu_type else ""
            problems.append((row.place, f"layer '{layer}'{on} is already in line {earlier.place.line}"))
        first = firsts.setdefault(layer, row)
        problems += [
            (row.place, f"{name}: must be the same in all rows of layer '{layer}', as in line {line}")
            for name in SAME_ON_ALL_TYPES
            if getattr(row.layer, name) != getattr(first.layer, name)
            for line in (first.place.line,)
        ]
    return problems


def _gaps(rows: list[LayerRow]) -> list[tuple[SourceLine, str]]:
    """Find layers that lack a GPU type which another layer has."""
    types: dict[str, set[str | None]] = {}
    firsts: dict[str, SourceLine] = {}
    for row in rows:
        types.setdefault(row.layer.name, set()).add(row.gpu_type)
        firsts.setdefault(row.layer.name, row.place)
    everywhere = {row.gpu_type for row in rows}
    return [
        (firsts[layer], f"layer '{layer}' has no row for gpu_type {missing or '(empty)'}, others have")
        for layer, found in types.items()
        for missing in sorted(str(name or "") for name in everywhere - found)
    ]
