"""Tables of results, in Markdown that a terminal can show, and figures beside their bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Row = Sequence[str]


@dataclass(frozen=True)
class Figure:
    """A measured value and the most that it may be."""

    what: str
    value: float
    bar: float

    @property
    def holds(self) -> bool:
        return self.value <= self.bar * (1 + 1e-9)

    @property
    def row(self) -> Row:
        return (self.what, f"{self.value:.4g}", f"at most {self.bar:g}", "yes" if self.holds else "**no**")


@dataclass(frozen=True)
class Table:
    """Cells under a header, with figures that are held against bars, and what has to be said of both.

    Parameters
    ----------
    rows : tuple of Row
        Without any, `note` says why.
    """

    title: str
    header: Row
    rows: tuple[Row, ...]
    figures: tuple[Figure, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        parts = [f"### {self.title}"]
        if self.note:
            parts.append(self.note)
        if self.rows:
            parts.append(markdown(self.header, self.rows))
        if self.figures:
            verdicts = [figure.row for figure in self.figures]
            parts.append(markdown(("figure", "value", "bar", "holds"), verdicts))
        return "\n\n".join(parts)


def markdown(header: Row, rows: Iterable[Row]) -> str:
    """Set cells out: the first column to the left, all others to the right."""
    lines = [header, *rows]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    aligned = [
        [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        for line in lines
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (aligned[0], rule, *aligned[1:]))
