"""Rate tables: CSV with the columns ``member,gpus,rate`` and perhaps ``gpu_type,samples``."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hetctl.files.names import MEMBER_NAME, MEMBER_RULE
from hetctl.files.refusal import Place, read_text, refusal, shown, suggestion

REQUIRED = ("member", "gpus", "rate")
OPTIONAL = ("gpu_type", "samples")
NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class RateRow:
    """The rate of a member on a number of GPUs.

    Parameters
    ----------
    rate : float
        Samples/s.
    samples : float or None
        Samples to convergence; the same in all rows of the member.
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
        The table must tell all about its members: `samples` of each, and rates on one type of GPU.

    Raises
    ------
    BadInputError
        If anything in it is wrong, with a line for each problem: ``FILE:LINE: column: rule``.
    """
    header, *records = _records(path)
    _check_header(header, (*REQUIRED, "samples") if with_work else REQUIRED)
    if not records:
        raise refusal([(header.place, "has no rows below its header")])
    rows, problems = [], []
    for record in records:
        try:
            rows.append((record.place, _row(record.under(header))))
        except _WrongRecordError as error:
            problems += [(record.place, rule) for rule in error.rules]
    problems += _contradictions(rows)
    problems += _gaps(rows) if with_work else []
    if problems:
        raise refusal(problems)
    return [row for _, row in rows]


def write_rates(rows: Iterable[RateRow], file: TextIO) -> None:
    """Write a table that `read_rates` reads as the same rows."""
    rows = list(rows)
    used = [name for name in OPTIONAL if any(getattr(row, name) is not None for row in rows)]
    columns = (*REQUIRED, *used)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([getattr(row, name) for name in columns] for row in rows)


class _WrongRecordError(Exception):
    def __init__(self, rules: list[str]) -> None:
        super().__init__(rules)
        self.rules = rules


@dataclass(frozen=True)
class _Record:
    place: Place
    cells: tuple[str, ...]

    def under(self, header: _Record) -> dict[str, str]:
        if len(self.cells) != len(header.cells):
            raise _WrongRecordError([f"has {len(self.cells)} cells, the header has {len(header.cells)}"])
        return dict(zip(header.cells, self.cells, strict=True))


def _records(path: Path) -> list[_Record]:
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        lines = [(reader.line_num, tuple(cell.strip() for cell in cells)) for cells in reader if cells]
    except csv.Error as error:
        raise refusal([(Place(path, max(reader.line_num, 1)), f"not CSV: {error}")]) from None
    if not lines:
        raise refusal([(Place(path, 1), f"is empty; the first line must be {','.join(REQUIRED)}")])
    return [_Record(Place(path, number), cells) for number, cells in lines]


def _check_header(header: _Record, required: Iterable[str]) -> None:
    known = (*REQUIRED, *OPTIONAL)
    problems = [f"column '{name}' is missing" for name in required if name not in header.cells]
    problems += [
        f"unknown column {shown(name)}" + suggestion(name, known)
        for name in header.cells
        if name not in known
    ]
    problems += [f"column '{name}' is given twice" for name in known if header.cells.count(name) > 1]
    if problems:
        raise refusal((header.place, rule) for rule in problems)


def _row(cells: Mapping[str, str]) -> RateRow:
    gpu_type, samples = cells.get("gpu_type", ""), cells.get("samples", "")
    rules = [
        (MEMBER_NAME.fullmatch(cells["member"]) is not None, "member", MEMBER_RULE),
        (_is_count(cells["gpus"]), "gpus", "must be a whole number of at least 1"),
        (_is_positive(cells["rate"]), "rate", "must be a positive number"),
        (gpu_type.isprintable(), "gpu_type", "must be printable text"),
        (not samples or _is_positive(samples), "samples", "must be a positive number"),
    ]
    broken = [f"{name}: {rule}, got {shown(cells[name])}" for holds, name, rule in rules if not holds]
    if broken:
        raise _WrongRecordError(broken)
    return RateRow(
        member=cells["member"],
        gpus=int(cells["gpus"]),
        rate=float(cells["rate"]),
        gpu_type=gpu_type or None,
        samples=float(samples) if samples else None,
    )


def _is_count(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,9}", text) is not None and int(text) >= 1


def _is_positive(text: str) -> bool:
    return NUMBER.fullmatch(text) is not None and 0 < float(text) < math.inf


def _contradictions(rows: list[tuple[Place, RateRow]]) -> list[tuple[Place, str]]:
    points: dict[tuple[str, int, str | None], Place] = {}
    firsts: dict[str, tuple[Place, RateRow]] = {}
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


def _gaps(rows: list[tuple[Place, RateRow]]) -> list[tuple[Place, str]]:
    firsts: dict[str, Place] = {}
    problems = []
    for place, row in rows:
        if row.samples is None and place == firsts.setdefault(row.member, place):
            problems.append((place, f"samples: member '{row.member}' has none, so its work is unknown"))
    return problems
