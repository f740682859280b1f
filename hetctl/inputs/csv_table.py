"""CSV tables of rates and of step times: each line's values by column, the columns' rules, errors by line."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from hetctl.inputs.input_errors import SourceLine, read_text, refusal, refuse, shown, suggestion
from hetctl.inputs.validation import MEMBER_NAME, MEMBER_RULE, NAME_RULE, SAFE_NAME
from hetctl.model.values import dataclass

# float() alone also accepts 'nan', 'inf', '1_000' and digits of other scripts.
NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")

Line = tuple[SourceLine, list[str]]
Problem = tuple[SourceLine, str]
Row = tuple[SourceLine, dict[str, Any]]


class Column(NamedTuple):
    """Rule of the cells of a column in words, its test, and the conversion of a text that passes it."""

    rule: str
    holds: Callable[[str], object]
    value: Callable[[str], Any] = str


def matching(pattern: re.Pattern[str], rule: str) -> Column:
    """Return a column of texts that match a pattern."""
    return Column(rule, pattern.fullmatch)


def whole_number(least: int, rule: str, digits: int = 9) -> Column:
    """Return a column of whole numbers with at most `digits` digits, which keeps later products small."""
    # \d would also match digits of other scripts.
    form = re.compile(rf"[0-9]{{1,{digits}}}")
    return Column(rule, lambda text: form.fullmatch(text) and int(text) >= least, int)


def number(least: float, most: float, rule: str) -> Column:
    """Return a column of numbers within limits."""
    return Column(rule, lambda text: NUMBER.fullmatch(text) and least <= float(text) <= most, float)


COUNT = whole_number(1, "must be a whole number of at least 1")
TEXT = Column("must be printable text", lambda text: text and text.isprintable())


def csv_lines(path: Path, text: str) -> list[Line]:
    """Return the non-empty lines, with cells stripped of blanks.

    Raises
    ------
    BadInputError
        If the file is not CSV.
    """
    # newline="" accepts all line ends unchanged; without strict, text after a closing quote passes.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return [
            (SourceLine(path, reader.line_num), [cell.strip() for cell in cells]) for cells in reader if cells
        ]
    except csv.Error as error:
        raise refusal([(SourceLine(path, max(reader.line_num, 1)), f"not CSV: {error}")]) from None


def read_table(
    path: Path, needed: Mapping[str, Column], optional: Mapping[str, Column], text: str | None = None
) -> tuple[list[Row], list[Problem]]:
    """Return the values of all lines below the header that follow the rules, and the errors of the others.

    An optional column that is missing, and an empty cell in it, give None.

    Parameters
    ----------
    text : str or None
        Content of the file, if it was read before.

    Raises
    ------
    BadInputError
        If the file is not CSV, has no rows, or its header has other columns.
    """
    found = csv_lines(path, read_text(path) if text is None else text)
    if not found:
        raise refusal([(SourceLine(path, 1), f"is empty; the first line must be {','.join(needed)}")])
    (first, header), *lines = found
    _check_header(first, header, needed, optional)
    if not lines:
        raise refusal([(first, "has no rows below its header")])
    columns = {**needed, **optional}
    rows: list[Row] = []
    problems = ragged(lines, len(header), f"the header has {len(header)}")
    for place, texts in lines:
        cells = {name: text for name, text in zip(header, texts, strict=False) if text or name in needed}
        wrong = [name for name, text in cells.items() if not columns[name].holds(text)]
        if len(texts) != len(header):
            continue
        problems += ((place, f"{name}: {columns[name].rule}, got {shown(cells[name])}") for name in wrong)
        if not wrong:
            values = {name: columns[name].value(text) for name, text in cells.items()}
            rows.append((place, dict.fromkeys(optional) | values))
    return rows, problems


def ragged(lines: Iterable[Line], columns: int, against: str) -> list[Problem]:
    """Return the lines with more or fewer cells."""
    return [(place, f"has {len(cells)} cells, {against}") for place, cells in lines if len(cells) != columns]


def repeated(keys: Iterable[tuple[SourceLine, Hashable]]) -> Iterator[tuple[SourceLine, SourceLine]]:
    """Yield the place of each repeated key, with the place of the first."""
    first: dict[Hashable, SourceLine] = {}
    for place, key in keys:
        if (earlier := first.setdefault(key, place)) != place:
            yield place, earlier


def _check_header(
    place: SourceLine, header: Sequence[str], needed: Iterable[str], optional: Iterable[str]
) -> None:
    known = (*needed, *optional)
    rules = [f"column '{name}' is missing" for name in needed if name not in header]
    rules += [
        f"unknown column {shown(name)}" + suggestion(name, known) for name in header if name not in known
    ]
    rules += [f"column '{name}' is given twice" for name in known if header.count(name) > 1]
    if rules:
        raise refusal((place, rule) for rule in rules)


RATE_COLUMNS = {
    "member": matching(MEMBER_NAME, MEMBER_RULE),
    "gpus": COUNT,
    "rate": number(1e-9, 1e12, "must be a number from 1e-9 to 1e12 samples/s"),
}
OPTIONAL_COLUMNS = {
    "gpu_type": TEXT,
    "samples": number(math.ulp(0.0), 1e15, "must be above 0, and at most 1e15"),
    "busy": number(1e-3, 1.0, "must be a share of the time from 0.001 to 1"),
}


@dataclass(frozen=True)
class RateRow:
    """Rate of a member on a number of GPUs.

    Parameters
    ----------
    rate : float
        Samples/s.
    samples : float or None
        Samples to convergence; equal in all rows of the member.
    busy : float or None
        Share of the time for which the member keeps its device busy alone on one GPU; in rows of one GPU.
    """

    member: str
    gpus: int
    rate: float
    gpu_type: str | None = None
    samples: float | None = None
    busy: float | None = None


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
    records, problems = read_table(path, RATE_COLUMNS, OPTIONAL_COLUMNS)
    rows = [(place, RateRow(**values)) for place, values in records]
    problems += _contradictions(rows)
    problems += _gaps(rows) if with_work else []
    refuse(problems)
    return [row for _, row in rows]


def write_rates(rows: Iterable[RateRow], file: TextIO) -> None:
    """Write a table from which `read_rates` returns the same rows."""
    rows = list(rows)
    used = [name for name in OPTIONAL_COLUMNS if any(getattr(row, name) is not None for row in rows)]
    columns = (*RATE_COLUMNS, *used)
    # The csv module writes CRLF by default, on every system.
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([getattr(row, name) for name in columns] for row in rows)


def _contradictions(rows: list[tuple[SourceLine, RateRow]]) -> Iterator[Problem]:
    at = dict(rows)
    for place, earlier in repeated((place, (row.member, row.gpus, row.gpu_type)) for place, row in rows):
        on = f"{at[place].gpus} GPUs" + (f" ({at[place].gpu_type})" if at[place].gpu_type else "")
        yield place, f"member '{at[place].member}' on {on} is already in line {earlier.line}"
    for place, row in rows:
        if row.busy is not None and row.gpus > 1:
            yield place, f"busy: is of one GPU, got {row.busy} on {row.gpus} GPUs"
    for place, earlier in repeated((place, row.member) for place, row in rows):
        if at[earlier].samples != at[place].samples:
            rule = f"samples: must be the same in all rows of member '{at[place].member}'"
            yield (
                place,
                f"{rule}, got {at[place].samples} here and {at[earlier].samples} in line {earlier.line}",
            )


def _gaps(rows: list[tuple[SourceLine, RateRow]]) -> list[Problem]:
    """Return the first line of each member without a number of samples."""
    firsts = {row.member: (place, row) for place, row in reversed(rows)}
    return [
        (place, f"samples: member '{name}' has none, so its work is unknown")
        for name, (place, row) in firsts.items()
        if row.samples is None
    ]


WORKER_COLUMNS = {
    "worker": matching(SAFE_NAME, NAME_RULE),
    "batch": COUNT,
    "seconds": number(1e-9, 1e9, "must be a number from 1e-09 to 1e+09"),
}


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
    rows, problems = read_table(path, WORKER_COLUMNS, {"max_batch": COUNT})
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[1]["worker"], []).append(row)
    for name, own in groups.items():
        problems += [*_disorder(name, own), *_caps(name, own)]
    refuse(problems)
    return [
        WorkerPoints(
            name,
            tuple((values["batch"], values["seconds"]) for _, values in own),
            own[0][1]["max_batch"],
            own[0][0],
        )
        for name, own in groups.items()
    ]


def _disorder(name: str, rows: list[Row]) -> Iterator[Problem]:
    for (earlier, before), (place, values) in pairwise(rows):
        if values["batch"] == before["batch"]:
            yield place, f"batch: worker '{name}' with {values['batch']} is already in line {earlier.line}"
        elif values["batch"] < before["batch"]:
            got = f"got {values['batch']} after {before['batch']} in line {earlier.line}"
            yield place, f"batch: must ascend for worker '{name}', {got}"


def _caps(name: str, rows: list[Row]) -> Iterator[Problem]:
    first, cap = rows[0][0], rows[0][1]["max_batch"]
    for place, values in rows:
        if values["max_batch"] != cap:
            got = f"got {values['max_batch'] or 'none'} here and {cap or 'none'} in line {first.line}"
            yield place, f"max_batch: must be the same in all rows of worker '{name}', {got}"
        elif cap is not None and values["batch"] > cap:
            yield place, f"batch: {values['batch']} is above the worker's max_batch of {cap}"
