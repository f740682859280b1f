"""Sections of a report: title, chart, table and notes, which the terminal and the HTML page print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field

from rich.box import Box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hetctl.model.values import dataclass
from hetctl.reports.units import printable

Note = tuple[str, str]
"""A line, and its style: ``dim``, ``yellow``, .."""
# A blank between columns and a rule below the header: eight columns fit 80 characters.
RULED = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")


@dataclass(frozen=True)
class Section:
    """Part of a result.

    Parameters
    ----------
    title : str
        Line above the table; on a page without it, the first header.
    about : str
        Explanation, on the page alone.
    chart : str
        SVG element, on the page alone.
    legend : sequence of (str, str)
        Marks of the chart as HTML, and what they stand for.
    headers : sequence of str
        Titles of columns; a leading ``>`` aligns the column to the right.
    rows : sequence of sequence of str or Text
        Cells; of texts without a style only printable characters are shown.
    fold : str or tuple of str
        Headers of the columns whose cells may be broken into lines. On a narrow terminal, cells of others are
        cut and end with an ellipsis.
    gap : int
        Blanks between columns on the terminal, beside the one that is always there.
    notes : sequence of (str, str)
        Lines below the table.
    log : sequence of str
        Lines of a log.
    closed : bool
        True if a page shows only the title at first.
    chosen : int or None
        Number of the row that a terminal shows in reverse.
    charts : mapping of str to str
        SVG elements in place of `chart`, of which a page shows one, by the names of a switch.
    """

    title: str = ""
    about: str = ""
    chart: str = ""
    legend: Sequence[tuple[str, str]] = ()
    headers: Sequence[str] = ()
    rows: Sequence[Sequence[str | Text]] = ()
    fold: str | tuple[str, ...] = ()
    gap: int = 1
    notes: Sequence[Note] = ()
    log: Sequence[str] = ()
    closed: bool = False
    chosen: int | None = None
    charts: Mapping[str, str] = field(default_factory=dict)

    def __rich__(self) -> RenderableType:
        """Return what a terminal shows."""
        parts: list[RenderableType] = [Text(printable(self.title), "bold")] if self.title else []
        parts += [self._table()] if self.headers else []
        parts += [Text(printable(text), style) for text, style in self.notes]
        lines = "\n".join(map(printable, self.log))
        log = Padding(Text(lines, "dim", overflow="fold"), (0, 0, 0, 2), expand=False)
        return Group(*parts, *([log] if self.log else []))

    def folds(self, header: str) -> bool:
        """Return true if the cells of a column may be broken into lines."""
        return header in ((self.fold,) if isinstance(self.fold, str) else self.fold)

    def _table(self) -> Table:
        table = Table(
            box=RULED, padding=(0, self.gap, 0, 0), pad_edge=False, show_edge=False, header_style="bold"
        )
        for header in self.headers:
            folds = self.folds(header)
            table.add_column(
                header.removeprefix(">"),
                justify="right" if header.startswith(">") else "left",
                no_wrap=not folds,
                overflow="fold" if folds else "ellipsis",
            )
        for number, row in enumerate(self.rows):
            # A plain string would be parsed for Rich's markup in brackets.
            cells = (cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row)
            table.add_row(*cells, style="reverse" if number == self.chosen else None)
        return table


@dataclass(frozen=True)
class Report:
    """Result as a whole.

    Parameters
    ----------
    title : str
        Title of the page.
    about : sequence of str
        Lines at the top.
    figures : sequence of (str, str, str)
        Names, values and remarks; remarks are on the page alone.
    state : str
        State that stands before the first line, on the page alone.
    details : callable
        Function that returns the sections that are on the page alone.
    colours : mapping of str to str
        Colours by name on the page.
    """

    title: str
    about: Sequence[str]
    figures: Sequence[tuple[str, str, str]] = ()
    sections: Sequence[Section] = ()
    state: str = ""
    details: Callable[[], Sequence[Section]] = tuple
    colours: Mapping[str, str] = field(default_factory=dict)

    def __rich__(self) -> RenderableType:
        """Return what a terminal shows."""
        first, *others = self.about
        head = [Text(printable(first), "bold"), *(Text(printable(line)) for line in others)]
        names, values, _ = zip(*self.figures, strict=True) if self.figures else ((), (), ())
        figures = [Section(headers=[f">{name}" for name in names], rows=[values])] if names else []
        return stacked([Group(*head), *figures, *self.sections])


def more(count: int, what: str = "more, which `--json` has") -> list[Note]:
    """Return the note on rows that are left out; none if none are."""
    return [(f"and {count:,} {what}", "dim")] if count > 0 else []


def stacked(parts: Iterable[RenderableType]) -> Group:
    """Return parts with an empty line between two."""
    return Group(*[line for part in parts for line in (Text(), part)][1:])
