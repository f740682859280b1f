"""Matplotlib figures as SVG within a page: scalable, small, and reproducible."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.path import Path

from hetctl.reports.style import GREY, INK, RULE

WIDTH, NARROW = 11.2, 4.9
"""Widths of a figure in inches, and of the same on a telephone."""
LABEL_SIZE = 8
"""Font size of the labels of bars in points."""
STYLE: dict[Any, Any] = {
    # Text is smaller than outlines, and search and screen readers can read it.
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "hatch.linewidth": 0.8,
    "text.color": INK,
    # Names may contain dollar signs, between which Matplotlib would typeset formulas.
    "text.parse_math": False,
    "axes.edgecolor": RULE,
    "axes.labelcolor": GREY,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    # Otherwise Matplotlib lays out all labels, to find that none is in the way of the title.
    "axes.titley": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    # Labels without ticks.
    **{f"{axis}tick.{which}.size": 0 for axis in "xy" for which in ("major", "minor")},
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": GREY,
    "ytick.labelcolor": GREY,
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
}
NUMBER = re.compile(r"-?\d+\.\d+")
TIP = "tip-"
MOST_DRAWN_TWICE = 2**19
"""Characters of a figure above which it is not drawn for telephones too, whose page scrolls sideways then."""


class Tips:
    """Texts that a browser shows over parts of a figure."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, text: str) -> str:
        """Store a text and return the id that its artist must have."""
        self.texts.append(text)
        return f"{TIP}{len(self.texts) - 1}"

    def element(self, match: re.Match[str]) -> str:
        """Replace an artist's id by its title."""
        name = match.group(1)
        if not (name.startswith(TIP) and self.texts):
            return "<g>"
        return f"<g><title>{html.escape(self.texts[int(name.removeprefix(TIP))])}</title>"


def is_narrow(figure: Figure) -> bool:
    """Return true for the figure of a telephone, where panels stand below one another."""
    return bool(figure.get_figwidth() == NARROW)


def panels(figure: Figure, count: int, row_inches: float) -> list[Axes]:
    """Return axes two to a row, or one on a telephone; the height of the figure follows."""
    columns = 1 if is_narrow(figure) else 2
    rows = -(-count // columns)
    figure.set_figheight(row_inches * rows)
    return [figure.add_subplot(rows, columns, place + 1) for place in range(count)]


def set_margins(
    figure: Figure,
    left: float,
    right: float,
    top: float,
    bottom: float,
    between: tuple[float, float] = (0, 0),
) -> None:
    """Set the margins of a figure in inches, and the gaps between its panels across and down, in panels."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height, *between)


def draw_svg(name: str, title: str, height: float, draw: Callable[[Figure, Tips], None]) -> Markup:
    """Draw a figure for wide and for narrow pages; return its ``<figure>`` element.

    Parameters
    ----------
    name : str
        Unique name in the page; it keeps the ids of figures apart.
    title : str
        Text for screen readers.
    height : float
        Height in inches, unless the function sets another one.
    draw : callable
        A function that draws on the empty figure, of either width.
    """
    drawn = _drawn(name, WIDTH, height, draw)
    if len(drawn) < MOST_DRAWN_TWICE:
        drawn += _drawn(f"{name}-{NARROW}", NARROW, height, draw)
    return Markup(f'<figure role="img" aria-label="{html.escape(title)}">{drawn}</figure>')


def _drawn(name: str, width: float, height: float, draw: Callable[[Figure, Tips], None]) -> str:
    # Matplotlib salts the ids in a figure at random by default; a fixed salt keeps pages reproducible.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure, tips, buffer = Figure(figsize=(width, height)), Tips(), io.StringIO()
        # Without pyplot, which would choose a backend and change the caller's Matplotlib.
        FigureCanvasSVG(figure)
        draw(figure, tips)
        # Without the date and the version, equal data give equal files.
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # Nothing hovers over a telephone.
    return _inline(buffer.getvalue(), figure, Tips() if is_narrow(figure) else tips)


def _inline(text: str, figure: Figure, tips: Tips) -> str:
    """Reduce an SVG file to the needs of a page: no links, no unused ids, short numbers."""
    body = text[text.index("<svg") :].partition(">")[2]
    body = re.sub(r'<metadata>.*?</metadata>|<style.*?</style>|<g id="[^"]*"/>', "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="([^"]*)">', tips.element, body)
    body = re.sub(r"<[^<>]+>", _shorten, body)
    width, height = figure.get_size_inches()
    kind = "phone" if is_narrow(figure) else "page"
    return f'<svg class="{kind}" viewBox="0 0 {width * 72:g} {height * 72:g}">{body}'


def _shorten(tag: re.Match[str]) -> str:
    text = re.sub(r' transform="rotate\(-?0 [^"]*"', "", tag.group())
    return re.sub(r'(?<= )(?:d|x|y)="[^"]*"', _shorten_numbers, text)


def _shorten_numbers(attribute: re.Match[str]) -> str:
    """Round to a tenth of a point, and remove the blanks that a path does not need."""
    text = NUMBER.sub(lambda number: f"{float(number.group()):.1f}".removesuffix(".0"), attribute.group())
    return re.sub(r"\s*([MLCQz])\s*", r"\1", text)


def rectangles(boxes: Sequence[tuple[float, float, float, float]]) -> Path:
    """Join boxes of (x0, y0, x1, y1) to one path."""
    vertices = [p for x0, y0, x1, y1 in boxes for p in ((x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0))]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    return Path(np.reshape(vertices, (-1, 2)), codes)


def shortened(name: str) -> str:
    """Return a name of at most 24 characters: the middle is left out."""
    return name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}"


def fits(text: str, points: float) -> bool:
    """Return true if a label fits a width in points."""
    return len(text) * LABEL_SIZE * 0.62 + 4 <= points


def time_unit(span: float) -> tuple[str, float]:
    """Return a suitable unit for an axis of so many seconds, and its length in seconds."""
    units = {"s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0}
    return next(((u, s) for u, s in reversed(units.items()) if span >= 3 * s), ("s", 1.0))
