"""Self-contained HTML page of a schedule of hops, or of its simulation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hetctl.model.run_status import StepSpan
from hetctl.reports.gantt import HOPS, gantt_svg
from hetctl.reports.page import fill
from hetctl.reports.palette import colours_of
from hetctl.reports.simulation_tables import HopperFigures, hops_headline
from hetctl.reports.summary import Spans, one_round
from hetctl.reports.units import format_percent, format_seconds

MOST_DRAWN = 20_000
"""Largest number of hops in a chart; more would be neither readable nor quick to load."""

TEMPLATE = """\
{% extends "base" %}
{% block about %}
<p>{{ about }}.</p>
{% if makespans_s | length > 1 %}
<p>An epoch by mode:
{% for mode, makespan_s in makespans_s.items() %}
{{ mode }} {{ makespan_s | seconds }}{{ "" if loop.last else "," }}
{% endfor %}
</p>
{% endif %}
{% endblock %}
{% block sections %}
<section>
<h2>Workers over time</h2>
{% if gantt %}
<p>One row for each worker; a bar is a configuration's visit to a partition, with its name or number.</p>
<div class="wide">{{ gantt }}</div>
{% call key() %}
<li><i class="idle"></i>idle</li>
<li><i class="hatched"></i>undone by a failure</li>
{% endcall %}
{% else %}
<p>{{ "{:,}".format(hops) }} hops are too many for a chart; --trace writes them to a file.</p>
{% endif %}
</section>

{% for what, rows, named in tables %}
<section>
<details{{ " open" if rows | length <= 40 else "" }}>
<summary>{{ what }}s</summary>
<div class="wide">
<table class="narrow">
<thead><tr><th>{{ what | lower }}</th><th class="number">hops</th><th class="number">undone</th>
<th class="number">began</th><th class="number">done</th><th class="number">busy</th></tr></thead>
<tbody>
{% for row in rows %}
<tr><td>{{ swatches[row.name] if named else "" }}{{ row.name }}</td>
<td class="number">{{ row.hops }}</td><td class="number">{{ row.undone }}</td>
<td class="number">{{ row.began_s | seconds }}</td><td class="number">{{ row.done_s | seconds }}</td>
<td class="number">{{ row.busy_s | seconds }}</td></tr>
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
class Row:
    """A worker, or a configuration; times are None if it has no hop."""

    name: str
    hops: int
    undone: int
    began_s: float | None
    done_s: float | None
    busy_s: float


def render_hopper(
    figures: HopperFigures, configs: Sequence[str], workers: Sequence[str], steps: Sequence[StepSpan]
) -> str:
    """Return the page; the same values give the same text.

    Parameters
    ----------
    configs, workers : sequence of str
        Configurations and workers in the order of the tables.
    steps : sequence of StepSpan
        Hops: `member` is the configuration, `node` the worker, `round` the epoch; an exit code
        other than 0 means that its result was lost by a failure.
    """
    colours = colours_of(configs)
    spans = Spans("slot", figures.workers, figures.makespan_s, steps, one_round(figures.makespan_s))
    drawn = 0 < len(steps) <= MOST_DRAWN
    return fill(
        TEMPLATE,
        colours,
        title="Hopper",
        about=hops_headline(figures),
        makespans_s=figures.makespans_s,
        cards=_cards(figures),
        hops=len(steps),
        gantt=Markup(gantt_svg(spans, colours, HOPS)) if drawn else None,
        tables=[
            ("Worker", _rows(workers, [(step.node, step) for step in steps]), False),
            ("Configuration", _rows(configs, [(step.member, step) for step in steps]), True),
        ],
    )


def _cards(figures: HopperFigures) -> list[tuple[str, str, str]]:
    return [
        ("makespan", format_seconds(figures.makespan_s), f"{figures.ratio:.3f} of the bound"),
        ("lower bound", format_seconds(figures.lower_bound_s), "workers that never fail"),
        ("workers busy", format_percent(figures.gpu_busy_fraction), "until the makespan"),
        ("lost to failures", format_seconds(figures.lost_s), "over all workers"),
        ("planning", f"{figures.plan_seconds:.3g} s", figures.scheduler),
    ]


def _rows(names: Iterable[str], steps: Iterable[tuple[str, StepSpan]]) -> list[Row]:
    by_name: Mapping[str, list[StepSpan]] = {name: [] for name in names}
    for name, step in steps:
        by_name[name].append(step)
    return [_row(name, those) for name, those in by_name.items()]


def _row(name: str, steps: Sequence[StepSpan]) -> Row:
    ends = [(step, step.end_s or 0.0) for step in steps if step.exit_code == 0]
    return Row(
        name=name,
        hops=len(ends),
        undone=len(steps) - len(ends),
        began_s=min((step.start_s for step in steps), default=None),
        done_s=max((end_s for _, end_s in ends), default=None),
        busy_s=sum(end_s - step.start_s for step, end_s in ends),
    )
