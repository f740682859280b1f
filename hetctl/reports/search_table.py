"""Terminal output of a search: its best trials."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from hetctl.model.searches import SearchStatus
from hetctl.reports.status_table import MEMBER_STYLES
from hetctl.reports.summary import describe_config
from hetctl.reports.table_style import ruled_table
from hetctl.reports.units import format_metric, format_percent, printable


def search_table(search: SearchStatus, most: int) -> RenderableType:
    """Return the best trials of a search, at most `most`, with their configs."""
    shown = search.trials[:most]
    rest = len(search.trials) - len(shown)
    table = ruled_table("trial", "state", ">epochs", ">best", ">last", "config", "parent", fold="config")
    for trial in shown:
        table.add_row(
            Text(printable(trial.member)),
            Text(trial.state, MEMBER_STYLES.get(trial.state, "")),
            f"{trial.epochs}/{trial.asked}",
            format_metric(trial.best),
            format_metric(trial.last),
            Text(printable(describe_config(trial.config))),
            Text(printable(trial.parent or "")),
        )
    more = [Text(f"and {rest:,} more trials, which `hetctl search export` has", "dim")] if rest else []
    if search.importance:
        shares = ", ".join(f"{key} {format_percent(share)}" for key, share in search.importance.items())
        more.append(Text(printable(f"importance for {search.metric}: {shares}")))
    return Group(Text(printable(_head(search)), "bold"), table, *more)


def _head(search: SearchStatus) -> str:
    best = "most" if search.mode == "max" else "least"
    state = f"ended: {search.ended}" if search.ended else "under way"
    return (
        f"run {search.run} · search {search.method} · {len(search.trials)} of at most {search.most} trials"
        f" · {best} {search.metric} first · {state}"
    )
