"""CSV files with a header: each line as its cells by column, and what is wrong with it by line."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetctl.files.rate_table import NUMBER
from hetctl.files.refusal import Place, read_text, refusal, shown, suggestion

Problem = tuple[Place, str]


@dataclass(frozen=True)
class Record:
    """A line below the header; its cells by column, without blanks around them."""

    place: Place
    cells: Mapping[str, str]


def read_records(
    path: Path, required: Sequence[str], optional: Sequence[str]
) -> tuple[list[Record], list[Problem]]:
    """Read the lines of a file, and name those that do not have a cell for each column.

    Raises
    ------
    BadInputError
        If it cannot be read, is not CSV, has no rows, or its header is not of these columns.
    """
    (first, header), *lines = _lines(path, required)
    _check_header(first, header, required, optional)
    if not lines:
        raise refusal([(first, "has no rows below its header")])
    fitting = [(place, cells) for place, cells in lines if len(cells) == len(header)]
    problems = [
        (place, f"has {len(cells)} cells, the header has {len(header)}")
        for place, cells in lines
        if len(cells) != len(header)
    ]
    return [Record(place, dict(zip(header, cells, strict=True))) for place, cells in fitting], problems


def is_count(text: str) -> bool:
    """Whether it is a whole number from 1 to a billion."""
    return re.fullmatch(r"[0-9]{1,9}", text) is not None and int(text) >= 1


def is_positive(text: str) -> bool:
    """Whether it is a finite number above 0."""
    return NUMBER.fullmatch(text) is not None and 0 < float(text) < math.inf


def _lines(path: Path, required: Sequence[str]) -> list[tuple[Place, list[str]]]:
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        lines = [
            (Place(path, reader.line_num), [cell.strip() for cell in cells]) for cells in reader if cells
        ]
    except csv.Error as error:
        raise refusal([(Place(path, max(reader.line_num, 1)), f"not CSV: {error}")]) from None
    if not lines:
        raise refusal([(Place(path, 1), f"is empty; the first line must be {','.join(required)}")])
    return lines


def _check_header(
    place: Place, header: Sequence[str], required: Sequence[str], optional: Sequence[str]
) -> None:
    known = (*required, *optional)
    rules = [f"column '{name}' is missing" for name in required if name not in header]
    rules += [
        f"unknown column {shown(name)}" + suggestion(name, known) for name in header if name not in known
    ]
    rules += [f"column '{name}' is given twice" for name in known if header.count(name) > 1]
    if rules:
        raise refusal((place, rule) for rule in rules)
