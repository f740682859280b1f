"""CSV tables: the values of each line by column, with the rule of each column, and errors by line."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hetctl.inputs.input_errors import SourceLine, read_text, refusal, shown, suggestion

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
