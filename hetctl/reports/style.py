"""Style of figures and tables: the colours of members, the same in every figure, and the frame of tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import Box
from rich.table import Table
from rich.text import Text

from hetctl.reports.units import printable

# Paul Tol's muted, light and vibrant schemes, which remain distinct for colour-blind readers.
COLOURS = (
    *("#332288", "#88CCEE", "#CC6677", "#117733", "#DDCC77", "#AA4499", "#44AA99", "#882255", "#999933"),
    *("#77AADD", "#EE8866", "#BBCC33", "#FFAABB", "#0077BB", "#EEDD88", "#CC3311", "#99DDFF", "#AAAA00"),
    *("#EE7733", "#44BB99"),
)
INK, GREY, RULE, IDLE = "#22262e", "#6b7280", "#d9dde3", "#eef0f3"


def colours_of(members: Iterable[str]) -> dict[str, str]:
    """Return a colour for every member, in order; they repeat after twenty."""
    return {member: COLOURS[i % len(COLOURS)] for i, member in enumerate(members)}


def ink_on(colour: str) -> str:
    """Return the text colour, dark or white, that is readable on a ``#rrggbb`` background."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    # Luma of ITU-R BT.601, which weighs colours as the eye does.
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


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
