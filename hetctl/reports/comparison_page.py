"""Page of several runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetctl.model.run_results import RunComparison
from hetctl.model.run_status import RunStatus
from hetctl.reports.page import legend, render
from hetctl.reports.run_charts import best_so_far_svgs, learning_svgs
from hetctl.reports.run_tables import comparison_tables
from hetctl.reports.sections import Report, Section
from hetctl.reports.style import colours_of
from hetctl.reports.summary import describe_time, ranked
from hetctl.reports.units import format_metric


def render_comparison(statuses: Sequence[RunStatus], compared: RunComparison) -> str:
    """Return the page; the runs are in the same order in both."""
    report = Report(
        title=" · ".join(status.run for status in statuses),
        about=[f"{status.run}: {status.state}, {describe_time(status)}" for status in statuses],
        figures=[
            (f"{status.run}, best {best.metric}", format_metric(best.best), best.member)
            for status in statuses
            for best in ranked(status)[:1]
        ],
        sections=list(_sections(statuses, compared)),
        colours=colours_of(status.run for status in statuses),
    )
    return render(report)


def _sections(statuses: Sequence[RunStatus], compared: RunComparison) -> Iterator[Section]:
    leaders = [ranked(status)[0] for status in statuses if ranked(status)]
    trained = [status for status in statuses if any(status.history.values())]
    if leaders and trained and len({one.metric for one in leaders}) == 1:
        charts = best_so_far_svgs(trained, leaders[0].metric, leaders[0].mode)
        about = "The best value of all members of a run by then."
        marks = legend(colours_of(status.run for status in trained))
        yield Section("Best so far", about, charts=charts, legend=marks)
    for section in comparison_tables(compared):
        yield replace(section, title=section.title.strip())
    # One colour for a member in all runs.
    colours = colours_of(dict.fromkeys(member.member for status in trained for member in status.members))
    for number, status in enumerate(trained):
        own = {member.member: colours[member.member] for member in status.members}
        charts = learning_svgs(status, own, f"{number}-")
        yield Section(f"Learning curves of {status.run}", charts=charts, legend=legend(own))
