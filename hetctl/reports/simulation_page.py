"""Self-contained HTML page of a simulation of any kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from hetctl.model.run_status import RoundSpan, TaskSpan
from hetctl.model.simulation import HopSimulation, Interval, Simulation, SimulationResult
from hetctl.reports.gantt import HOPS, RUN, Wording, gantt_svg
from hetctl.reports.page import fill
from hetctl.reports.simulation_tables import view_of
from hetctl.reports.style import colours_of
from hetctl.reports.summary import Spans, one_round

MOST_DRAWN = 20_000
"""Largest number of bars in a chart; more would be neither readable nor quick to load."""
MOST_MARKED = 20
"""Largest number of rounds whose starts are marked."""

TEMPLATE = """\
{% extends "base" %}
{% block about %}
{% for line in about %}
<p>{{ line }}</p>
{% endfor %}
{% endblock %}
{% block sections %}
{% if chart %}
<section>
<h2>{{ chart.heading }}</h2>
{% if gantt %}
<p>{{ chart.about }}</p>
<div class="wide">{{ gantt }}</div>
{% call key() %}
<li><i class="idle"></i>idle</li>
{% if chart.undone %}
<li><i class="hatched"></i>undone by a failure</li>
{% endif %}
{% endcall %}
{% else %}
<p>{{ "{:,}".format(chart.bars) }} {{ chart.bar }} are too many for a chart; --trace writes them
to a file.</p>
{% endif %}
</section>
{% endif %}

{% for grid in grids %}
<section>
<details{{ " open" if grid.rows | length <= 40 else "" }}>
<summary>{{ grid.title or title }}</summary>
<div class="wide">
<table class="narrow">
<thead><tr>
{% for header in grid.headers %}
<th{{ cell(header) }}>{{ header.lstrip(">") }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in grid.rows %}
<tr>
{%- for value in row -%}
<td{{ cell(grid.headers[loop.index0]) }}>
{{- swatches[value] if grid.swatches and loop.first else "" }}{{ value }}</td>
{%- endfor -%}
</tr>
{% endfor %}
</tbody>
</table>
</div>
</details>
</section>
{% endfor %}
{% endblock %}
"""


@dataclass(frozen=True)
class Chart:
    """Gantt chart of a page.

    Parameters
    ----------
    names : iterable of str
        Names that have colours.
    bars : int
        Number of bars, each of them a `bar`.
    spans : callable
        Function that returns the spans to draw.
    undone : bool
        True if bars may be undone by a failure.
    """

    heading: str
    about: str
    names: Iterable[str]
    bars: int
    bar: str
    spans: Callable[[], Spans]
    wording: Wording = RUN
    undone: bool = False


def simulation_page(result: object) -> str:
    """Return the page of a result of `Simulated`; the same result gives the same text."""
    view = view_of(result)
    chart = CHARTS[type(result)](result) if type(result) in CHARTS else None
    colours = colours_of(chart.names) if chart else {}
    is_drawn = chart and 0 < chart.bars <= MOST_DRAWN
    return fill(
        TEMPLATE,
        colours,
        title=view.title,
        about=[view.headline, *view.lines, *(text for text, _ in view.notes)],
        cards=[(name.replace("\n", " "), value, remark) for name, value, remark in view.figures],
        chart=chart,
        gantt=Markup(gantt_svg(chart.spans(), colours, chart.wording)) if chart and is_drawn else None,
        grids=[*view.grids, *view.details()],
        cell=lambda header: Markup(' class="number"') if header.startswith(">") else "",
    )


def _chart_of_members(result: SimulationResult) -> Chart:
    simulation = result.simulation
    marked = simulation.rounds <= MOST_MARKED
    about = (
        "One row for each GPU; a bar is a time in which a member held it, restarts included, with its name"
    )
    return Chart(
        heading="GPUs over time",
        about=f"{about} or number.{' A thin line starts a round.' if marked else ''}",
        names=[member.member for member in simulation.members],
        bars=len(simulation.intervals),
        bar="intervals",
        spans=lambda: _spans(simulation, marked=marked),
    )


def _spans(simulation: Simulation, *, marked: bool) -> Spans:
    """Return the spans for the chart; many rounds are shown as one."""
    tasks = [
        TaskSpan(i.member, i.round_index, part.node, part.gpus, i.start_s, i.end_s, exit_code=0)
        for i in simulation.intervals
        for part in i.allocation.placement
    ]
    rounds = _rounds(simulation) if marked else one_round(simulation.makespan_s)
    return Spans("gpu", simulation.gpus, simulation.makespan_s, tasks, rounds)


def _rounds(simulation: Simulation) -> tuple[RoundSpan, ...]:
    starts: dict[int, list[Interval]] = {}
    for interval in simulation.intervals:
        starts.setdefault(interval.round_index, []).append(interval)
    return tuple(
        RoundSpan(index, 0, min(i.start_s for i in those), max(i.end_s for i in those), 0.0, None)
        for index, those in starts.items()
    )


def _chart_of_hops(hops: HopSimulation) -> Chart:
    return Chart(
        heading="Workers over time",
        about="One row for each worker; a bar is a configuration's visit to a partition, with its name or"
        " number.",
        names=hops.config_names,
        bars=len(hops.tasks),
        bar="hops",
        spans=lambda: Spans("slot", hops.workers, hops.makespan_s, hops.tasks, one_round(hops.makespan_s)),
        wording=HOPS,
        undone=True,
    )


CHARTS: Mapping[type, Callable[[Any], Chart]] = {
    SimulationResult: _chart_of_members,
    HopSimulation: _chart_of_hops,
}
"""Charts of results by their type; others have none."""
