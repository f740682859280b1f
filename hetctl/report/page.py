"""Self-contained HTML page of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from hetctl.model.run_status import RunStatus
from hetctl.report.curves import BOLD_MEMBERS, accuracy_svg, comparable, learning_svg
from hetctl.report.gantt import gantt_svg
from hetctl.report.page_template import BASE, RUN
from hetctl.report.palette import colours_of, ink_on
from hetctl.report.summary import (
    STATES,
    busy_fraction,
    describe_comparison,
    describe_error,
    describe_states,
    describe_time,
    gpus_by_round,
    prediction_error,
    ranked,
    spans_of,
)
from hetctl.report.units import (
    NONE,
    device_word,
    format_metric,
    format_percent,
    format_rate,
    format_seconds,
    printable,
)

LEGEND = 40
ROUNDS_WIDTH = 31


def render_page(status: RunStatus) -> str:
    """Return the report of a run; the same status gives the same text."""
    colours = colours_of(member.member for member in status.members)
    judged = comparable(status)
    return fill(
        RUN,
        colours,
        title=status.run,
        status=status,
        cards=_cards(status),
        faint=f" The {BOLD_MEMBERS} best are bold." if len(colours) > BOLD_MEMBERS else "",
        device=device_word(status.device, 1),
        devices=device_word(status.device),
        time=describe_time(status),
        comparison=describe_comparison(status),
        failed=[member for member in status.members if member.state == "failed"],
        gantt=Markup(gantt_svg(spans_of(status), colours)) if status.steps else None,
        learning=Markup(learning_svg(status, colours)) if any(status.history.values()) else None,
        accuracy=Markup(accuracy_svg(judged, colours)) if judged else None,
    )


def fill(template: str, colours: Mapping[str, str], **values: Any) -> str:
    """Return a page: a template that extends the base, with a legend of the members' colours.

    Parameters
    ----------
    values : Any
        Variables of the template; the base needs `title` and `cards` of (name, figure, remark).
    """
    swatches = {
        member: Markup(_swatch(i, colour)) for i, (member, colour) in enumerate(colours.items(), start=1)
    }
    environment = Environment(
        loader=DictLoader({"base": BASE}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.finalize = lambda value: printable(value) if type(value) is str else value
    environment.filters |= {
        "seconds": format_seconds,
        "rate": format_rate,
        "metric": format_metric,
        "rounds": lambda counts: gpus_by_round(counts, ROUNDS_WIDTH),
    }
    return environment.from_string(template).render(
        swatches=swatches,
        legend=list(swatches.items())[:LEGEND],
        unnamed=max(0, len(colours) - LEGEND),
        **values,
    )


def _cards(status: RunStatus) -> list[tuple[str, str, str]]:
    """Return the key figures as (name, figure, remark)."""
    error = prediction_error(status.predicted_s, status.measured_s) if status.state == "finished" else None
    rounds = _count(len(status.rounds), "round")
    jobs = _count(len({span.job for span in status.rounds}), "job")
    done = sum(member.state == "converged" for member in status.members)
    others = describe_states(status, STATES[1:]) or "every member"
    busy = format_percent(busy_fraction(status))
    return [
        ("measured", format_seconds(status.measured_s), f"{rounds} in {jobs}"),
        ("predicted", format_seconds(status.predicted_s), "" if error is None else describe_error(error)),
        (f"{device_word(status.device)} busy", busy, "while jobs held them"),
        ("converged", f"{done} of {len(status.members)}", others),
        _best_card(status),
    ]


def _best_card(status: RunStatus) -> tuple[str, str, str]:
    for best in ranked(status):
        return f"best {best.metric}", format_metric(best.best), best.member
    return "best member", NONE, "not known yet"


def _swatch(number: int, colour: str) -> str:
    return f'<i style="background:{colour};color:{ink_on(colour)}">{number}</i>'


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"
