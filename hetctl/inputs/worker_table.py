"""Step times of workers: CSV with the columns ``worker,batch,seconds`` and optionally ``max_batch``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hetctl.inputs.csv_table import CsvRow, Problem, is_count, is_positive, records_in
from hetctl.inputs.input_errors import SourceLine, read_text, refusal, shown
from hetctl.inputs.validation import NAME_RULE, SAFE_NAME

REQUIRED = ("worker", "batch", "seconds")
OPTIONAL = ("max_batch",)
LEAST_S, MOST_S = 1e-9, 1e9


@dataclass(frozen=True)
class WorkerPoints:
    """Measurements of a worker.

    Parameters
    ----------
    points : tuple of (batch, seconds)
        Measured points in ascending order of the batch.
    max_batch : int or None
        Largest batch that fits into its memory.
    place : SourceLine
        First line of the worker.
    """

    name: str
    points: tuple[tuple[int, float], ...]
    max_batch: int | None
    place: SourceLine


def read_workers(path: Path) -> list[WorkerPoints]:
    """Read the workers of a file, in the order of their first lines.

    Raises
    ------
    BadInputError
        If the file has errors, with a line for each: ``FILE:LINE: column: rule``.
    """
    records, problems = records_in(path, read_text(path), REQUIRED, OPTIONAL)
    wrong = {record.place: rules for record in records if (rules := _broken(record))}
    problems += [(place, rule) for place, rules in wrong.items() for rule in rules]
    groups: dict[str, list[CsvRow]] = {}
    for record in records:
        if record.place not in wrong:
            groups.setdefault(record.cells["worker"], []).append(record)
    for rows in groups.values():
        problems += [*_disorder(rows), *_caps(rows)]
    if problems:
        raise refusal(problems)
    return [_worker(rows) for rows in groups.values()]


def _worker(rows: list[CsvRow]) -> WorkerPoints:
    return WorkerPoints(
        name=rows[0].cells["worker"],
        points=tuple((_batch(row), float(row.cells["seconds"])) for row in rows),
        max_batch=_cap(rows[0]),
        place=rows[0].place,
    )


def _broken(record: CsvRow) -> list[str]:
    cells = record.cells
    cap = cells.get("max_batch", "")
    rules = [
        (SAFE_NAME.fullmatch(cells["worker"]) is not None, "worker", NAME_RULE),
        (is_count(cells["batch"]), "batch", "must be a whole number of at least 1"),
        (_is_time(cells["seconds"]), "seconds", f"must be a number from {LEAST_S:g} to {MOST_S:g}"),
        (not cap or is_count(cap), "max_batch", "must be a whole number of at least 1"),
    ]
    return [f"{name}: {rule}, got {shown(cells[name])}" for holds, name, rule in rules if not holds]


def _is_time(text: str) -> bool:
    return is_positive(text) and LEAST_S <= float(text) <= MOST_S


def _disorder(rows: list[CsvRow]) -> Iterable[Problem]:
    for earlier, row in pairwise(rows):
        name, batch, before = row.cells["worker"], _batch(row), _batch(earlier)
        where = f"in line {earlier.place.line}"
        if batch == before:
            yield row.place, f"batch: worker '{name}' with {batch} is already {where}"
        elif batch < before:
            yield row.place, f"batch: must ascend for worker '{name}', got {batch} after {before} {where}"


def _caps(rows: list[CsvRow]) -> Iterable[Problem]:
    first, cap = rows[0], _cap(rows[0])
    for row in rows:
        if _cap(row) != cap:
            rule = f"max_batch: must be the same in all rows of worker '{row.cells['worker']}'"
            got = f"{_cap_text(row)} here and {_cap_text(first)} in line {first.place.line}"
            yield row.place, f"{rule}, got {got}"
        elif cap is not None and _batch(row) > cap:
            yield row.place, f"batch: {_batch(row)} is above the worker's max_batch of {cap}"


def _batch(row: CsvRow) -> int:
    return int(row.cells["batch"])


def _cap(row: CsvRow) -> int | None:
    cap = row.cells.get("max_batch", "")
    return int(cap) if cap else None


def _cap_text(row: CsvRow) -> str:
    return row.cells["max_batch"] or "none"
