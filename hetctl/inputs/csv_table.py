"""CSV tables: cells of each line, by column if there is a header, and errors by line."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetctl.inputs.input_errors import SourceLine, refusal, shown, suggestion

# float() alone also accepts 'nan', 'inf', '1_000' and digits of other scripts.
NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")

Line = tuple[SourceLine, list[str]]
Problem = tuple[SourceLine, str]


@dataclass(frozen=True)
class CsvRow:
    """Line below the header, with its cells by column, stripped of blanks."""

    place: SourceLine
    cells: Mapping[str, str]


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


def records_in(
    path: Path, text: str, required: Sequence[str], optional: Sequence[str]
) -> tuple[list[CsvRow], list[Problem]]:
    """Return the lines below the header, and the errors of lines without one cell per column.

    Raises
    ------
    BadInputError
        If the file is not CSV, has no rows, or its header has other columns.
    """
    found = csv_lines(path, text)
    if not found:
        raise refusal([(SourceLine(path, 1), f"is empty; the first line must be {','.join(required)}")])
    (first, header), *lines = found
    _check_header(first, header, required, optional)
    if not lines:
        raise refusal([(first, "has no rows below its header")])
    fitting = [(place, cells) for place, cells in lines if len(cells) == len(header)]
    problems = [
        (place, f"has {len(cells)} cells, the header has {len(header)}")
        for place, cells in lines
        if len(cells) != len(header)
    ]
    return [CsvRow(place, dict(zip(header, cells, strict=True))) for place, cells in fitting], problems


def is_count(text: str) -> bool:
    """Return true if the text is a whole number from 1 to a billion."""
    # \d would also match digits of other scripts; nine digits keep later products small.
    return re.fullmatch(r"[0-9]{1,9}", text) is not None and int(text) >= 1


def is_positive(text: str) -> bool:
    """Return true if the text is a finite number above 0."""
    return NUMBER.fullmatch(text) is not None and 0 < float(text) < math.inf


def _check_header(
    place: SourceLine, header: Sequence[str], required: Sequence[str], optional: Sequence[str]
) -> None:
    known = (*required, *optional)
    rules = [f"column '{name}' is missing" for name in required if name not in header]
    rules += [
        f"unknown column {shown(name)}" + suggestion(name, known) for name in header if name not in known
    ]
    rules += [f"column '{name}' is given twice" for name in known if header.count(name) > 1]
    if rules:
        raise refusal((place, rule) for rule in rules)
