"""Partitions of the training data as CSV: where each lies or is copied from, and on which nodes it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetctl.inputs.csv_table import CsvRow, Problem, records_in
from hetctl.inputs.input_errors import SourceLine, read_text, refusal, shown

COLUMNS = ("partition", "path", "nodes")
SOURCE = "source"
MOST_DIGITS = 9


@dataclass(frozen=True)
class PlacedPartition:
    """One line of the file.

    Parameters
    ----------
    path : str
        Path on its nodes, with variables of the node.
    nodes : tuple of str
        Names of the nodes that have it; empty if they are unknown.
    source : str
        Path from which these nodes copy it in each job; empty if it is there.
    """

    path: str
    nodes: tuple[str, ...]
    source: str = ""


def read_partition_table(path: Path) -> list[PlacedPartition]:
    """Read a file with one line for each partition, in the order of their numbers.

    Raises
    ------
    BadInputError
        If the file has errors, with a line for each: ``FILE:LINE: rule``.
    """
    rows, problems = records_in(path, read_text(path), COLUMNS, (SOURCE,))
    numbered = [(row, row.cells["partition"]) for row in rows]
    problems += [problem for row in rows for problem in _wrong_cells(row)]
    problems += _wrong_numbers(path, [(row.place, text) for row, text in numbered])
    problems += _same_targets(rows)
    if problems:
        raise refusal(problems)
    found = {
        int(text): PlacedPartition(row.cells["path"], _nodes(row), row.cells.get(SOURCE, ""))
        for row, text in numbered
    }
    return [found[number] for number in sorted(found)]


def _nodes(row: CsvRow) -> tuple[str, ...]:
    text = row.cells["nodes"]
    return tuple(name.strip() for name in text.split(";")) if text else ()


def _wrong_cells(row: CsvRow) -> Iterator[Problem]:
    path, text, nodes = row.cells["path"], row.cells["nodes"], _nodes(row)
    if not path or not path.isprintable():
        yield row.place, f"path must be printable text, got {shown(path)}"
    if rule := wrong_source(row.cells.get(SOURCE, "")):
        yield row.place, f"source {rule}"
    for name in nodes:
        if not name or not name.isprintable() or any(letter.isspace() for letter in name):
            yield row.place, f"nodes must be names separated by ';', or empty, got {shown(text)}"
            return
    if len(set(nodes)) < len(nodes):
        yield row.place, f"nodes has a name twice: {shown(text)}"


def wrong_source(source: str) -> str | None:
    """Return what is wrong with a path from which partitions are copied; None if nothing is."""
    if source and not (source.startswith(("/", "$")) and source.isprintable()):
        return f"must be absolute, or begin with a variable, got {shown(source)}"
    return None


def _same_targets(rows: Sequence[CsvRow]) -> Iterator[Problem]:
    """Yield lines with the path of another, if one of both is copied: they would replace each other."""
    first: dict[str, CsvRow] = {}
    for row in rows:
        other = first.setdefault(row.cells["path"], row)
        if other is not row and (row.cells.get(SOURCE) or other.cells.get(SOURCE)):
            rule = f"path {shown(row.cells['path'])} is already in line {other.place.line}"
            yield row.place, f"{rule}, and partitions that are copied need paths of their own"


def _wrong_numbers(path: Path, numbered: Sequence[tuple[SourceLine, str]]) -> Iterable[Problem]:
    """Yield numbers that are not whole or come twice; if there are none of these, those that are missing."""
    first: dict[int, SourceLine] = {}
    problems = []
    for place, text in numbered:
        if not (text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS):
            problems.append((place, f"partition must be a whole number from 0, got {shown(text)}"))
        elif (earlier := first.setdefault(int(text), place)) != place:
            problems.append((place, f"partition {int(text)} is already in line {earlier.line}"))
    if problems:
        return problems
    missing = sorted(set(range(len(first))) - first.keys())
    return [(SourceLine(path, 1), f"partition {number} is missing") for number in missing]
