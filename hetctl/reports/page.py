"""Self-contained HTML page of a report; Jinja escapes inserted values."""

from __future__ import annotations

from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hetctl.reports.sections import Report
from hetctl.reports.style import ink_on
from hetctl.reports.units import printable

IDLE_MARK = (Markup('<i class="idle"></i>'), "idle")
LEGEND = 40
"""Most names in a legend."""


def render(report: Report) -> str:
    """Return the page of a report; equal reports give equal texts."""
    # A name that is missing in the values is an error, not an empty place on the page.
    environment = Environment(
        loader=PackageLoader("hetctl.reports", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Markup is a subclass of str whose text must stay as it is.
    environment.finalize = lambda value: printable(value) if type(value) is str else value
    return environment.get_template("page.html.j2").render(
        report=report,
        sections=[*report.sections, *report.details()],
        swatches=swatches(report.colours),
    )


def swatches(colours: Mapping[str, str]) -> dict[str, Markup]:
    """Return the mark of each name: its number on its colour."""
    return {
        name: swatch(colour, ink_on(colour), str(number))
        for number, (name, colour) in enumerate(colours.items(), start=1)
    }


def swatch(colour: str, ink: str = "", text: str = "") -> Markup:
    """Return a mark of one colour."""
    return Markup('<i style="background:{};color:{}">{}</i>').format(colour, ink, text)


def legend(colours: Mapping[str, str], *marks: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the legend of the first names, with further marks."""
    rest = len(colours) - LEGEND
    more = [("", f"and {rest} more; colours repeat")] if rest > 0 else []
    named = [(mark, name) for name, mark in swatches(colours).items()]
    return [*named[:LEGEND], *more, *marks]
