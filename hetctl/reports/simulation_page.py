"""Self-contained HTML page of a simulation."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from hetctl.model.run_status import RoundSpan, StepSpan
from hetctl.model.simulation import Interval, Simulation
from hetctl.reports.gantt import gantt_svg
from hetctl.reports.page import fill
from hetctl.reports.palette import colours_of
from hetctl.reports.summary import Spans, one_round
from hetctl.reports.units import format_percent, format_seconds

MOST_DRAWN = 20_000
"""Largest number of intervals in a chart; more would be neither readable nor quick to load."""
MOST_MARKED = 20
"""Largest number of rounds whose starts are marked."""

TEMPLATE = """\
{% extends "base" %}
{% block about %}
<p>{{ s.planner }}{{ " on %d GPUs, %d to a node" | format(s.gpus, s.gpus_per_node) }}; objective
{{ s.objective }}, work {{ s.work }}, sharing {{ s.sharing }}.</p>
{% if s.reason %}
<p>Chosen by auto: {{ s.reason }}.</p>
{% endif %}
{% endblock %}
{% block sections %}
<section>
<h2>GPUs over time</h2>
{% if gantt %}
<p>One row for each GPU; a bar is a time in which a member held it, restarts included, with its name or
number.{{ " A thin line starts a round." if marked }}</p>
<div class="wide">{{ gantt }}</div>
{% call key() %}
<li><i class="idle"></i>idle</li>
{% endcall %}
{% else %}
<p>{{ "{:,}".format(s.intervals | length) }} intervals are too many for a chart; --trace writes them
to a file.</p>
{% endif %}
</section>

<section>
<details{{ " open" if s.members | length <= 40 else "" }}>
<summary>Members</summary>
<div class="wide">
<table class="narrow">
<thead><tr><th>member</th><th class="number">arrived</th><th class="number">done</th>
<th class="number">from arrival to end</th><th class="number">with GPUs</th></tr></thead>
<tbody>
{% for member in s.members %}
<tr><td>{{ swatches[member.member] }}{{ member.member }}</td>
<td class="number">{{ arrivals[member.member] | seconds }}</td>
<td class="number">{{ member.done_s | seconds }}</td>
<td class="number">{{ (member.done_s - arrivals[member.member]) | seconds }}</td>
<td class="number">{{ member.training_s | seconds }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
</details>
</section>
{% endblock %}
"""


def render_simulation(title: str, simulation: Simulation, arrivals: Mapping[str, float]) -> str:
    """Return the page of a simulation; the same simulation gives the same text.

    Parameters
    ----------
    title : str
        Name of the ensemble.
    arrivals : mapping
        Seconds from the start by member.
    """
    colours = colours_of(member.member for member in simulation.members)
    drawn = 0 < len(simulation.intervals) <= MOST_DRAWN
    return fill(
        TEMPLATE,
        colours,
        title=f"{title}, simulated",
        s=simulation,
        arrivals=arrivals,
        cards=_cards(simulation),
        marked=simulation.rounds <= MOST_MARKED,
        gantt=Markup(gantt_svg(_spans(simulation), colours)) if drawn else None,
    )


def _cards(simulation: Simulation) -> list[tuple[str, str, str]]:
    bound = f"{simulation.ratio:.3f} of the bound, {format_seconds(simulation.lower_bound_s)}"
    remarks = {simulation.objective: bound}
    restarts = f"{simulation.restarts:,}"
    return [
        ("makespan", format_seconds(simulation.makespan_s), remarks.get("makespan", "")),
        ("mean completion", format_seconds(simulation.mean_jct_s), remarks.get("mean-jct", "from arrival")),
        ("GPUs busy", format_percent(simulation.gpu_busy_fraction), "restarts left out"),
        ("restarts", restarts, f"in {simulation.rounds:,} rounds"),
        ("planning", f"{simulation.plan_seconds:.3g} s", f"{simulation.slowest_plan_s:.2g} s at most"),
    ]


def _rounds(simulation: Simulation) -> tuple[RoundSpan, ...]:
    starts: dict[int, list[Interval]] = {}
    for interval in simulation.intervals:
        starts.setdefault(interval.round_index, []).append(interval)
    return tuple(
        RoundSpan(index, 0, min(i.start_s for i in those), max(i.end_s for i in those), 0.0, None)
        for index, those in starts.items()
    )


def _spans(simulation: Simulation) -> Spans:
    """Return the spans for the chart; many rounds are shown as one."""
    steps = [_span(i, part.node, part.gpus) for i in simulation.intervals for part in i.allocation.placement]
    marked = simulation.rounds <= MOST_MARKED
    rounds = _rounds(simulation) if marked else one_round(simulation.makespan_s)
    return Spans("gpu", simulation.gpus, simulation.makespan_s, steps, rounds)


def _span(interval: Interval, node: str, gpus: tuple[int, ...]) -> StepSpan:
    return StepSpan(
        interval.member, interval.round_index, node, gpus, interval.start_s, interval.end_s, exit_code=0
    )
