"""The one style of table that hetctl prints."""

from __future__ import annotations

from rich.box import Box
from rich.table import Table

# A blank between columns and a rule below the header: eight columns fit 80 characters.
RULED = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")


def ruled_table(*headers: str, gap: int = 0, fold: str = "") -> Table:
    """Make an empty table.

    Parameters
    ----------
    headers : str
        A leading ``>`` puts the column to the right.
    gap : int
        Blanks between columns beside the first one.
    fold : str
        The header of the column whose cells may break; no other one's may.
    """
    table = Table(box=RULED, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for header in headers:
        table.add_column(
            header.removeprefix(">"),
            justify="right" if header.startswith(">") else "left",
            no_wrap=header != fold,
            overflow="fold",
        )
    return table
