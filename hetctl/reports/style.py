"""Colours of members, the same in every figure."""

from __future__ import annotations

from collections.abc import Iterable

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
