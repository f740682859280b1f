"""Rate tables: CSV with the columns ``member,gpus,rate`` and optionally ``gpu_type,samples``."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hetctl.inputs.csv_table import is_count, is_positive, records_in
from hetctl.inputs.input_errors import SourceLine, read_text, refusal, shown
from hetctl.inputs.validation import MEMBER_NAME, MEMBER_RULE

REQUIRED = ("member", "gpus", "rate")
OPTIONAL = ("gpu_type", "samples")
RATES, SAMPLES = (1e-9, 1e12), (0.0, 1e15)
"""Least and largest rates in samples/s, and numbers of samples."""


@dataclass(frozen=True)
class RateRow:
    """Rate of a member on a number of GPUs.

    Parameters
    ----------
    rate : float
        Samples/s.
    samples : float or None
        Samples to convergence; equal in all rows of the member.
    """

    member: str
    gpus: int
    rate: float
    gpu_type: str | None = None
    samples: float | None = None


def read_rates(path: Path, *, with_work: bool = False) -> list[RateRow]:
    """Read a rate table.

    Parameters
    ----------
    with_work : bool
        If true, the table must be complete: `samples` of each member, and rates on one type of GPU.

    Raises
    ------
    BadInputError
        If the file has errors, with a line for each: ``FILE:LINE: column: rule``.
    """
    required = (*REQUIRED, "samples") if with_work else REQUIRED
    records, problems = records_in(path, read_text(path), required, OPTIONAL)
    rows = []
    for record in records:
        broken = _broken(record.cells)
        problems += [(record.place, rule) for rule in broken]
        if not broken:
            rows.append((record.place, _row(record.cells)))
    problems += _contradictions(rows)
    problems += _gaps(rows) if with_work else []
    if problems:
        raise refusal(problems)
    return [row for _, row in rows]


def write_rates(rows: Iterable[RateRow], file: TextIO) -> None:
    """Write a table from which `read_rates` returns the same rows."""
    rows = list(rows)
    used = [name for name in OPTIONAL if any(getattr(row, name) is not None for row in rows)]
    columns = (*REQUIRED, *used)
    # The csv module writes CRLF by default, on every system.
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([getattr(row, name) for name in columns] for row in rows)


def _broken(cells: Mapping[str, str]) -> list[str]:
    gpu_type, samples = cells.get("gpu_type", ""), cells.get("samples", "")
    rules = [
        (MEMBER_NAME.fullmatch(cells["member"]) is not None, "member", MEMBER_RULE),
        (is_count(cells["gpus"]), "gpus", "must be a whole number of at least 1"),
        (is_positive(cells["rate"]), "rate", "must be a positive number"),
        (_is_within(cells["rate"], RATES), "rate", "must be from 1e-9 to 1e12 samples/s"),
        (gpu_type.isprintable(), "gpu_type", "must be printable text"),
        (not samples or is_positive(samples), "samples", "must be a positive number"),
        (not samples or _is_within(samples, SAMPLES), "samples", "must be at most 1e15"),
    ]
    return [f"{name}: {rule}, got {shown(cells[name])}" for holds, name, rule in rules if not holds]


def _is_within(cell: str, limits: tuple[float, float]) -> bool:
    return not is_positive(cell) or limits[0] <= float(cell) <= limits[1]


def _row(cells: Mapping[str, str]) -> RateRow:
    samples = cells.get("samples", "")
    return RateRow(
        member=cells["member"],
        gpus=int(cells["gpus"]),
        rate=float(cells["rate"]),
        gpu_type=cells.get("gpu_type") or None,
        samples=float(samples) if samples else None,
    )


def _contradictions(rows: list[tuple[SourceLine, RateRow]]) -> list[tuple[SourceLine, str]]:
    points: dict[tuple[str, int, str | None], SourceLine] = {}
    firsts: dict[str, tuple[SourceLine, RateRow]] = {}
    problems = []
    for place, row in rows:
        earlier = points.setdefault((row.member, row.gpus, row.gpu_type), place)
        if earlier != place:
            on = f"{row.gpus} GPUs" + (f" ({row.gpu_type})" if row.gpu_type else "")
            problems.append((place, f"member '{row.member}' on {on} is already in line {earlier.line}"))
        first_place, first = firsts.setdefault(row.member, (place, row))
        if first.samples != row.samples:
            rule = f"samples: must be the same in all rows of member '{row.member}', got {row.samples}"
            problems.append((place, f"{rule} here and {first.samples} in line {first_place.line}"))
    return problems


def _gaps(rows: list[tuple[SourceLine, RateRow]]) -> list[tuple[SourceLine, str]]:
    firsts: dict[str, SourceLine] = {}
    problems = []
    for place, row in rows:
        if row.samples is None and place == firsts.setdefault(row.member, place):
            problems.append((place, f"samples: member '{row.member}' has none, so its work is unknown"))
    return problems
