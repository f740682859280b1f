"""Frame of the self-contained HTML pages: style, key figures and legend; Jinja escapes inserted values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from hetctl.reports.pipeline_tables import describe_layout
from hetctl.reports.style import ink_on
from hetctl.reports.summary import gpus_by_round, named
from hetctl.reports.units import (
    format_bytes,
    format_metric,
    format_percent,
    format_rate,
    format_seconds,
    printable,
)

LEGEND = 40
ROUNDS_WIDTH = 31

BASE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }} · hetctl report</title>
<style>
:root { --ink: #22262e; --grey: #6b7280; --rule: #e3e6ea; --idle: #eef0f3; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--ink);
  font: 15px/1.5 Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 56px; }
header { margin: 0 4px 20px; }
h1 { margin: 0; font-size: 30px; line-height: 1.2; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { margin: 0 0 2px; font-size: 17px; }
p { margin: 0; color: var(--grey); overflow-wrap: anywhere; }
header p { margin-top: 6px; }
section { margin-top: 18px; padding: 20px 22px; background: #fff; border: 1px solid var(--rule);
  border-radius: 10px; }
section > p:not(:only-child) { margin-bottom: 12px; font-size: 13.5px; }
.state { display: inline-block; padding: 1px 10px; border-radius: 99px; background: #e7eaee;
  color: var(--ink); font-size: 13px; font-weight: 600; }
.finished, .converged { background: #dff1e4; color: #14602f; }
.running, .training { background: #dcecf9; color: #124e7c; }
.failed { background: #fbe3e0; color: #98231a; }
.warning { color: #8a5a00; }
.cards { display: grid; grid-template-columns: repeat(5, 1fr); gap: 12px; }
.card { padding: 13px 16px; background: #fff; border: 1px solid var(--rule); border-radius: 10px; }
.card b { display: block; font-size: 23px; line-height: 1.35; letter-spacing: -.01em; }
.card span { color: var(--grey); font-size: 13px; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 720px; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: inherit !important; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 12px 0 0; padding: 0; list-style: none;
  font-size: 13px; }
i { display: inline-block; min-width: 20px; height: 15px; margin-right: 6px; padding: 0 3px;
  border-radius: 3px; font: 600 10.5px/15px Inter, system-ui, sans-serif; text-align: center;
  vertical-align: 1px; }
i.idle, i.hatched { vertical-align: -3px; }
i.idle { background: var(--idle); border: 1px solid #d5d9df; }
i.hatched { background: repeating-linear-gradient(135deg, #fff 0 2px, #6b7280 2px 3.5px);
  border: 1px solid #6b7280; }
table { width: 100%; border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { color: var(--grey); font-weight: 600; text-align: left; vertical-align: bottom; }
th, td { padding: 6px 12px 6px 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
table.narrow { width: auto; }
.narrow th, .narrow td { padding-right: 28px; }
td.text { white-space: normal; min-width: 170px; overflow-wrap: anywhere; color: var(--grey); }
.number { text-align: right; }
summary { cursor: pointer; font-weight: 600; }
details table { margin-top: 10px; }
pre { margin: 8px 0 0; padding: 12px 14px; overflow-x: auto; background: #f6f7f9; border-radius: 8px;
  font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
footer { margin: 20px 4px 0; color: var(--grey); font-size: 13px; }
@media (max-width: 800px) {
  main { padding: 22px 12px 36px; }
  section { padding: 16px 14px; }
  .cards { grid-template-columns: repeat(2, 1fr); }
  .card:last-child { grid-column: 1 / -1; }
  h1 { font-size: 24px; }
}
@media print { body { background: #fff; } section { break-inside: avoid; } }
</style>
</head>
<body>
<main>
<header>
<h1>{{ title }}</h1>
{% block about %}{% endblock %}
</header>

<div class="cards">
{% for what, figure, remark in cards %}
<div class="card"><span>{{ what }}</span><b>{{ figure }}</b><span>{{ remark }}</span></div>
{% endfor %}
</div>

{% macro key() %}
<ul class="legend">
{% for member, swatch in legend %}
<li>{{ swatch }}{{ member }}</li>
{% endfor %}
{% if unnamed %}
<li>and {{ unnamed }} more; colours repeat</li>
{% endif %}
{{ caller() }}
</ul>
{% endmacro %}

{% block sections %}{% endblock %}

<footer>Made by hetctl.</footer>
</main>
</body>
</html>
"""


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
        # A name that is missing in the values is an error, not an empty place on the page.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Markup is a subclass of str whose text must stay as it is.
    environment.finalize = lambda value: printable(value) if type(value) is str else value
    environment.filters |= {
        "seconds": format_seconds,
        "percent": format_percent,
        "rate": format_rate,
        "metric": format_metric,
        "bytes": format_bytes,
        "layout": describe_layout,
        "named": named,
        "rounds": lambda counts: gpus_by_round(counts, ROUNDS_WIDTH),
    }
    return environment.from_string(template).render(
        swatches=swatches,
        legend=list(swatches.items())[:LEGEND],
        unnamed=max(0, len(colours) - LEGEND),
        **values,
    )


def _swatch(number: int, colour: str) -> str:
    return f'<i style="background:{colour};color:{ink_on(colour)}">{number}</i>'
