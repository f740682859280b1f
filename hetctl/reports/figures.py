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
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.path import Path

from hetctl.reports.style import GREY, INK, RULE

WIDTH = 11.2  # inches
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
        if not name.startswith(TIP):
            return "<g>"
        return f"<g><title>{html.escape(self.texts[int(name.removeprefix(TIP))])}</title>"


def draw_svg(name: str, title: str, height: float, draw: Callable[[Figure, Tips], None]) -> Markup:
    """Draw a figure and return its ``<svg>`` element.

    Parameters
    ----------
    name : str
        Unique name in the page; it keeps the ids of figures apart.
    title : str
        Text for screen readers.
    height : float
        Height in inches.
    draw : callable
        A function that draws on the empty figure.
    """
    # Matplotlib salts the ids in a figure at random by default; a fixed salt keeps pages reproducible.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure, tips, buffer = Figure(figsize=(WIDTH, height)), Tips(), io.StringIO()
        # Without pyplot, which would choose a backend and change the caller's Matplotlib.
        FigureCanvasSVG(figure)
        draw(figure, tips)
        # Without the date and the version, equal data give equal files.
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Markup(_inline(buffer.getvalue(), title, height, tips))


def _inline(text: str, title: str, height: float, tips: Tips) -> str:
    """Reduce an SVG file to the needs of a page: no links, no unused ids, short numbers."""
    body = text[text.index("<svg") :].partition(">")[2]
    body = re.sub(r'<metadata>.*?</metadata>|<style.*?</style>|<g id="[^"]*"/>', "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="([^"]*)">', tips.element, body)
    body = re.sub(r"<[^<>]+>", _shorten, body)
    box = f"0 0 {WIDTH * 72:g} {height * 72:g}"
    return f'<svg viewBox="{box}" role="img" aria-label="{html.escape(title)}">{body}'


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


def fits(text: str, points: float) -> bool:
    """Return true if a label fits a width in points."""
    return len(text) * LABEL_SIZE * 0.62 + 4 <= points


def time_unit(span: float) -> tuple[str, float]:
    """Return a suitable unit for an axis of so many seconds, and its length in seconds."""
    units = {"s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0}
    return next(((u, s) for u, s in reversed(units.items()) if span >= 3 * s), ("s", 1.0))
