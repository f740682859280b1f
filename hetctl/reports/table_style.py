"""Common style of hetctl's tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import Box
from rich.table import Table
from rich.text import Text

from hetctl.reports.units import printable

# A blank between columns and a rule below the header: eight columns fit 80 characters.
RULED = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")


def ruled_table(
    headers: Iterable[str],
    rows: Iterable[Sequence[str | Text]],
    gap: int = 0,
    fold: str | tuple[str, ...] = "",
) -> Table:
    """Return a table.

    Parameters
    ----------
    headers : iterable of str
        Titles of columns; a leading ``>`` aligns the column to the right.
    rows : iterable of sequence of str or Text
        Cells; of texts without a style only printable characters are shown.
    gap : int
        Additional blanks between columns.
    fold : str or tuple of str
        Title or titles of the columns whose cells may be broken into lines. Cells of others that a narrow
        terminal cuts end with an ellipsis.
    """
    folding = (fold,) if isinstance(fold, str) else fold
    table = Table(box=RULED, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for header in headers:
        table.add_column(
            header.removeprefix(">"),
            justify="right" if header.startswith(">") else "left",
            no_wrap=header not in folding,
            overflow="fold" if header in folding else "ellipsis",
        )
    for row in rows:
        # A plain string would be parsed for Rich's markup in brackets.
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    return table
