"""Self-contained HTML pages of simulations: of planners, and of schedules of hops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hetctl.model.run_status import RoundSpan, TaskSpan
from hetctl.model.simulation import Interval, Simulation
from hetctl.reports.gantt import HOPS, gantt_svg
from hetctl.reports.page import fill
from hetctl.reports.palette import colours_of
from hetctl.reports.simulation_tables import HopperFigures, hops_headline
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
    tasks = [_span(i, part.node, part.gpus) for i in simulation.intervals for part in i.allocation.placement]
    marked = simulation.rounds <= MOST_MARKED
    rounds = _rounds(simulation) if marked else one_round(simulation.makespan_s)
    return Spans("gpu", simulation.gpus, simulation.makespan_s, tasks, rounds)


def _span(interval: Interval, node: str, gpus: tuple[int, ...]) -> TaskSpan:
    return TaskSpan(
        interval.member, interval.round_index, node, gpus, interval.start_s, interval.end_s, exit_code=0
    )


MOST_HOPS = 20_000
"""Largest number of hops in a chart; more would be neither readable nor quick to load."""

HOPPER_TEMPLATE = """\
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
    figures: HopperFigures, configs: Sequence[str], workers: Sequence[str], tasks: Sequence[TaskSpan]
) -> str:
    """Return the page; the same values give the same text.

    Parameters
    ----------
    configs, workers : sequence of str
        Configurations and workers in the order of the tables.
    tasks : sequence of TaskSpan
        Hops: `member` is the configuration, `node` the worker, `round` the epoch; an exit code
        other than 0 means that its result was lost by a failure.
    """
    colours = colours_of(configs)
    spans = Spans("slot", figures.workers, figures.makespan_s, tasks, one_round(figures.makespan_s))
    drawn = 0 < len(tasks) <= MOST_HOPS
    return fill(
        HOPPER_TEMPLATE,
        colours,
        title="Hopper",
        about=hops_headline(figures),
        makespans_s=figures.makespans_s,
        cards=_hopper_cards(figures),
        hops=len(tasks),
        gantt=Markup(gantt_svg(spans, colours, HOPS)) if drawn else None,
        tables=[
            ("Worker", _rows(workers, [(task.node, task) for task in tasks]), False),
            ("Configuration", _rows(configs, [(task.member, task) for task in tasks]), True),
        ],
    )


def _hopper_cards(figures: HopperFigures) -> list[tuple[str, str, str]]:
    return [
        ("makespan", format_seconds(figures.makespan_s), f"{figures.ratio:.3f} of the bound"),
        ("lower bound", format_seconds(figures.lower_bound_s), "workers that never fail"),
        ("workers busy", format_percent(figures.gpu_busy_fraction), "until the makespan"),
        ("lost to failures", format_seconds(figures.lost_s), "over all workers"),
        ("planning", f"{figures.plan_seconds:.3g} s", figures.scheduler),
    ]


def _rows(names: Iterable[str], tasks: Iterable[tuple[str, TaskSpan]]) -> list[Row]:
    by_name: Mapping[str, list[TaskSpan]] = {name: [] for name in names}
    for name, task in tasks:
        by_name[name].append(task)
    return [_row(name, those) for name, those in by_name.items()]


def _row(name: str, tasks: Sequence[TaskSpan]) -> Row:
    ends = [(task, task.end_s or 0.0) for task in tasks if task.exit_code == 0]
    return Row(
        name=name,
        hops=len(ends),
        undone=len(tasks) - len(ends),
        began_s=min((task.start_s for task in tasks), default=None),
        done_s=max((end_s for _, end_s in ends), default=None),
        busy_s=sum(end_s - task.start_s for task, end_s in ends),
    )
