"""Self-contained HTML page of a run."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from hetctl.model.pipelines import PipelineEpoch, PipelineStatus
from hetctl.model.run_status import RunStatus
from hetctl.model.searches import SearchStatus
from hetctl.reports.gantt import gantt_svg
from hetctl.reports.page import fill
from hetctl.reports.run_charts import (
    BOLD_MEMBERS,
    MOST_HISTORIES,
    MOST_PIPELINES,
    PARTS,
    accuracy_svg,
    balance_svg,
    comparable,
    hop_svg,
    learning_svg,
    search_svg,
    stage_svg,
)
from hetctl.reports.style import colours_of
from hetctl.reports.summary import (
    STATES,
    busy_fraction,
    describe_batches,
    describe_comparison,
    describe_error,
    describe_states,
    describe_time,
    failures_of,
    prediction_error,
    ranked,
    spans_of,
)
from hetctl.reports.units import NONE, device_word, format_metric, format_percent, format_seconds

RUN = """\
{% extends "base" %}
{% block about %}
<p><span class="state {{ status.state }}">{{ status.state }}</span> {{ status.reason }}</p>
<p>Ensemble {{ status.ensemble }} of {{ status.members | length }} members on site {{ status.site }},
{{ status.gpus }} {{ device if status.gpus == 1 else devices }}, planner {{ status.planner }}; {{ time }}.</p>
{% if comparison %}
<p>{{ comparison }}</p>
{% endif %}
{% endblock %}
{% block sections %}
{% if not gantt %}
<section><p>No task has started yet; figures appear as members train.</p></section>
{% endif %}

{% if gantt %}
<section>
<h2>{{ devices[0] | upper }}{{ devices[1:] }} over time</h2>
<p>One row for each {{ device }}; a bar is a member's task, with its name or number; pale while it
runs. A thin line starts a round; white is time without a job.</p>
<div class="wide">{{ gantt }}</div>
{% call key() %}
<li><i class="idle"></i>idle</li>
<li><i class="hatched"></i>failed task</li>
{% endcall %}
</section>
{% endif %}

{% if status.hops %}
<section>
<h2>Workers over time</h2>
{% if hopping %}
<p>One row for each worker; a bar is a member's visit to a partition, with its name or number. After each
epoch of training the member is evaluated.</p>
<div class="wide">{{ hopping }}</div>
{% call key() %}
<li><i class="idle"></i>idle</li>
<li><i class="hatched"></i>lost, and repeated</li>
{% endcall %}
{% else %}
<p>{{ "{:,}".format(status.hops.spans | length) }} visits: there is no chart of none, or of more than 20,000;
hetctl hopper trace writes them to a file.</p>
{% endif %}
</section>

<section>
<h2>Hops, predicted and measured</h2>
<p>Times from each plan to the end of its visits; the bound is the least possible of the planned times.</p>
<div class="wide">
<table class="narrow">
<thead><tr><th class="number">at</th><th>reason</th><th>scheduler</th><th class="number">workers</th>
<th class="number">bound</th><th class="number">predicted</th><th class="number">measured</th></tr></thead>
<tbody>
{% for plan in status.hops.plans %}
<tr><td class="number">{{ plan.start_s | seconds }}</td><td>{{ plan.reason }}</td>
<td>{{ plan.scheduler }}</td><td class="number">{{ plan.workers }}</td>
<td class="number">{{ plan.lower_bound_s | seconds }}</td>
<td class="number">{{ plan.predicted_s | seconds }}</td>
<td class="number">{{ plan.measured_s | seconds }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
<div class="wide">
<table class="narrow">
<thead><tr><th>worker</th><th class="number">busy</th><th class="number">waiting</th>
<th class="number">mean hop</th><th class="number">visits</th><th class="number">repeated</th></tr></thead>
<tbody>
{% for worker in status.hops.workers %}
<tr><td>{{ worker.worker }}</td><td class="number">{{ worker.gpu_busy_fraction | percent }}</td>
<td class="number">{{ worker.waiting_fraction | percent }}</td>
<td class="number">{{ worker.hop_s | seconds }}</td>
<td class="number">{{ worker.visits }}</td><td class="number">{{ worker.repeated }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
</section>
{% endif %}

{% if learning %}
<section>
<h2>Learning curves</h2>
<p>A dot ends the curve of a converged member, a cross that of a failed one.{{ faint }}</p>
<div class="wide">{{ learning }}</div>
{% call key() %}{% endcall %}
</section>
{% endif %}

{% if trials %}
<section>
<h2>Trials of the search</h2>
<p>A line for each trial of {{ search.method }}, from the values of its config to its best
{{ search.metric }}; the darker, the better. {{ importance }}</p>
<div class="wide">{{ trials }}</div>
</section>
{% endif %}

{% if balance %}
<section>
<h2>Balanced batches</h2>
<p>Left: samples of each worker in a step; right: time of the slowest worker, with t*, the least time of any
split of the batch, dashed.{{ gains }}</p>
<div class="wide">{{ balance }}</div>
</section>
{% endif %}

{% if stage_charts %}
<section>
<h2>Stages of pipelines</h2>
<p>Shares of each stage's time in the last epoch, by virtual worker and stage, with node and {{ device }}, and
layers. The last stage runs both passes of a minibatch in one, drawn as forward. First stages
wait for waves of other virtual workers (the clock distance D); idle is all other time without a pass: the
pipeline fills or drains, or another stage is slower.{{ undrawn }}</p>
{% for one, chart in stage_charts %}
<p><b>{{ one.member }}</b>: {{ one.layout | layout }}; epoch {{ one.last.epoch }},
{{ one.last.duration_s | seconds }}</p>
<div class="wide">{{ chart }}</div>
{% endfor %}
<ul class="legend">
{% for part, colour in stage_colours.items() %}
<li><i style="background:{{ colour }}"></i>{{ part }}</li>
{% endfor %}
<li><i class="idle"></i>idle</li>
</ul>
</section>
{% endif %}

{% if status.pipelines %}
<section>
<h2>Pipelines, predicted and measured</h2>
<p>Rates in samples/s: simulated for the layout, and measured in the last epoch. In that epoch: the slowest
stage and its busy share; shares of time in which first stages waited for waves, and in which stages were
idle.</p>
<div class="wide">
<table class="narrow">
<thead><tr><th>member</th><th>layout</th><th class="number">predicted</th><th class="number">measured</th>
<th>slowest stage</th><th class="number">busy</th><th class="number">waits</th>
<th class="number">idle</th></tr></thead>
<tbody>
{% for one in status.pipelines %}
{% set use = one.last.use if one.last else none %}
<tr><td>{{ swatches[one.member] }}{{ one.member }}</td><td>{{ one.layout | layout }}</td>
<td class="number">{{ one.predicted_rate | rate }}</td>
<td class="number">{{ (one.last.rate if one.last else none) | rate }}</td>
<td>{{ use.slowest if use else "no epoch yet" }}</td>
<td class="number">{{ (use.gpu_busy_fraction if use else none) | percent }}</td>
<td class="number">{{ (use.wave_wait_fraction if use else none) | percent }}</td>
<td class="number">{{ (use.idle_fraction if use else none) | percent }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
</section>

{% if status.wave_checks %}
<section>
<h2>Staleness in pipelines</h2>
<p>Most updates that a minibatch missed of its own virtual worker (local) and of any other (global), and the
bounds of N_m minibatches in flight and the clock distance D, in all rounds.</p>
<div class="wide">
<table class="narrow">
<thead><tr><th>member</th><th class="number">in flight</th><th class="number">D</th>
<th class="number">minibatches</th><th class="number">local</th><th class="number">bound</th>
<th class="number">global</th><th class="number">bound</th><th class="number">violations</th></tr></thead>
<tbody>
{% for one in status.wave_checks %}
<tr><td>{{ swatches[one.member] }}{{ one.member }}</td><td class="number">{{ one.in_flight }}</td>
<td class="number">{{ one.distance }}</td><td class="number">{{ one.minibatches }}</td>
<td class="number">{{ one.local }}</td><td class="number">{{ one.local_bound }}</td>
<td class="number">{{ "-" if one.overall is none else one.overall }}</td>
<td class="number">{{ "-" if one.overall is none else one.overall_bound }}</td>
<td class="number">{{ one.violations | length }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
{% if status.wave_checks | map(attribute="violations") | select | list %}
<p>Violations are defects: <code>hetctl pipeline check {{ status.run }}</code> lists them.</p>
{% endif %}
</section>
{% endif %}

{% if stage_charts %}
<section>
<h2>Bytes between stages</h2>
<p>Sent in the last epoch: passes are activations and gradients, parameters are updates and weights.</p>
<div class="wide">
<table class="narrow">
<thead><tr><th>member</th><th class="number">within nodes: passes</th><th class="number">parameters</th>
<th class="number">between nodes: passes</th><th class="number">parameters</th></tr></thead>
<tbody>
{% for one in status.pipelines if one.last %}
<tr><td>{{ swatches[one.member] }}{{ one.member }}</td>
{% for link in (one.last.use.within_node, one.last.use.between_nodes) %}
<td class="number">{{ link.passes | bytes }}</td><td class="number">{{ link.parameters | bytes }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table>
</div>
</section>
{% endif %}
{% endif %}

{% if accuracy %}
<section>
<h2>Predicted against measured time</h2>
<p>Time of converged members in tasks, over all rounds: start-up, training, evaluation and checkpoints.</p>
<div class="wide">{{ accuracy }}</div>
</section>
{% endif %}

<section>
<h2>Members</h2>
<p>Rates are in samples/s, on as many {{ devices }} as the member held last; a dot stands for a round without
the member.</p>
{% for warning in status.warnings %}
<p class="warning">{{ warning }}.</p>
{% endfor %}
<div class="wide">
<table>
<thead><tr><th>member</th><th>state</th><th>{{ devices }} per round</th><th class="number">rate profiled</th>
<th class="number">rate seen</th>
<th class="number">epochs</th><th>metric</th><th class="number">best</th><th class="number">predicted</th>
<th class="number">measured</th><th>reason of its end, changes of its global batch</th></tr></thead>
<tbody>
{% for member in status.members %}
<tr><td>{{ swatches[member.member] }}{{ member.member }}</td>
<td><span class="state {{ member.state }}">{{ member.state }}</span></td>
<td>{{ member.gpus_by_round | rounds }}</td>
<td class="number">{{ (member.last_rate.profiled if member.last_rate else None) | rate }}</td>
<td class="number">{{ (member.last_rate.seen if member.last_rate else None) | rate }}</td>
<td class="number">{{ member.epochs }}/{{ member.max_epochs }}</td>
<td>{{ member.metric }}</td>
<td class="number">{{ member.best | metric }}</td>
<td class="number">{{ member.predicted_s | seconds }}</td>
<td class="number">{{ member.measured_s | seconds }}</td>
<td class="text">{{ member.reason or "" }}{% if batches[member.member] %}
{{ "; " if member.reason }}{{ batches[member.member] }}{% endif %}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
</section>

{% if failed %}
<section>
<h2>Failures</h2>
{% for group in failed %}
<p><b>{{ group.names | named }}</b>: {{ group.reason }}</p>
<pre>{% for line in group.log_tail %}{{ line }}
{% endfor %}{{ group.log }}</pre>
{% endfor %}
</section>
{% endif %}

{% if status.rounds %}
<section>
<details{{ " open" if status.rounds | length <= 12 else "" }}>
<summary>Rounds</summary>
<div class="wide">
<table class="narrow">
<thead><tr><th class="number">round</th><th class="number">job</th><th class="number">start</th>
<th class="number">predicted</th><th class="number">measured</th><th>ended by</th></tr></thead>
<tbody>
{% for span in status.rounds %}
<tr><td class="number">{{ span.index }}</td><td class="number">{{ span.job }}</td>
<td class="number">{{ span.start_s | seconds }}</td><td class="number">{{ span.predicted_s | seconds }}</td>
<td class="number">{{ (none if span.end_s is none else span.end_s - span.start_s) | seconds }}</td>
<td>{{ span.ended_by or "still running" }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
</details>
</section>
{% endif %}
{% endblock %}
"""


def render_page(status: RunStatus, search: SearchStatus | None = None) -> str:
    """Return the report of a run, and of its search if it has one; the same values give the same text."""
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
        batches={member.member: describe_batches(member, status.device) for member in status.members},
        failed=failures_of(status),
        gantt=Markup(gantt_svg(spans_of(status), colours)) if status.tasks else None,
        hopping=_hopping(status, colours),
        learning=Markup(learning_svg(status, colours)) if any(status.history.values()) else None,
        search=search,
        trials=_trials(search),
        importance=_importance(search),
        balance=Markup(balance_svg(status.balances[:MOST_HISTORIES])) if status.balances else None,
        gains=_gains(status),
        stage_charts=_stage_charts(status),
        stage_colours={part: colour for part, (colour, _) in PARTS.items() if part != "idle"},
        undrawn=_undrawn(status),
        accuracy=Markup(accuracy_svg(judged, colours)) if judged else None,
    )


def _trials(search: SearchStatus | None) -> Markup | None:
    drawn = search_svg(search) if search else None
    return None if drawn is None else Markup(drawn)


def _importance(search: SearchStatus | None) -> str:
    """Return a sentence about the importance of the keys of the configs."""
    if search is None or not search.importance:
        return ""
    shares = ", ".join(f"{key} {format_percent(share)}" for key, share in search.importance.items())
    return f"Importance of the keys (PED-ANOVA): {shares}."


def _hopping(status: RunStatus, colours: Mapping[str, str]) -> Markup | None:
    drawn = hop_svg(status.hops, colours) if status.hops else None
    return None if drawn is None else Markup(drawn)


def _trained(status: RunStatus) -> list[tuple[PipelineStatus, PipelineEpoch]]:
    """Return the pipelines that have trained, with their last epochs."""
    return [(one, one.last) for one in status.pipelines if one.last]


def _stage_charts(status: RunStatus) -> list[tuple[PipelineStatus, Markup]]:
    return [
        (one, Markup(stage_svg(number, one.member, last)))
        for number, (one, last) in enumerate(_trained(status)[:MOST_PIPELINES])
    ]


def _undrawn(status: RunStatus) -> str:
    """Return a sentence about pipelines that are not drawn."""
    rest = len(_trained(status)) - MOST_PIPELINES
    return f" Of {rest + MOST_PIPELINES} members the first {MOST_PIPELINES} are drawn." if rest > 0 else ""


def _gains(status: RunStatus) -> str:
    """Return a sentence about the gains of all members with balanced batches."""
    shown = ", ".join(
        f"{one.member} {one.gain:.2f} ({one.iteration_s:.3g} s instead of {one.equal_batches_s:.3g} s)"
        for one in status.balances[:MOST_HISTORIES]
    )
    rest = len(status.balances) - MOST_HISTORIES
    return f" Gain over equal batches: {shown}{f' and {rest} more members' if rest > 0 else ''}."


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


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"
