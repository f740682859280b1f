"""Self-contained HTML pages: of a run, and of runs beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hetctl.model.profile import some_of
from hetctl.model.run_results import RunComparison
from hetctl.model.run_status import RunStatus
from hetctl.model.searches import SearchStatus
from hetctl.reports.gantt import RUN, gantt_section
from hetctl.reports.page import IDLE_MARK, legend, render, swatch
from hetctl.reports.pipeline_tables import describe_layout, wave_check_table
from hetctl.reports.run_charts import (
    BOLD_MEMBERS,
    MOST_HISTORIES,
    MOST_PIPELINES,
    MOST_SHARES,
    PARTS,
    SHARES,
    accuracy_svg,
    balance_svg,
    best_so_far_svgs,
    clusters_svg,
    comparable,
    configs_svg,
    configured,
    hop_section,
    learning_svgs,
    pareto_svg,
    shares_svg,
    stage_svg,
)
from hetctl.reports.run_tables import comparison_tables
from hetctl.reports.sections import Report, Section
from hetctl.reports.status_table import describe_importance, status_sections
from hetctl.reports.style import colours_of
from hetctl.reports.summary import (
    STATES,
    busy_fraction,
    describe_clusters,
    describe_comparison,
    describe_error,
    describe_states,
    describe_time,
    describe_usage,
    prediction_error,
    ranked,
)
from hetctl.reports.units import NONE, counted, device_word, format_metric, format_percent, format_seconds

MOST_OPEN = 12
"""Largest number of rounds that are listed at first."""


def render_page(status: RunStatus, search: SearchStatus | None = None) -> str:
    """Return the report of a run, and of its search if it has one; the same values give the same text."""
    colours = colours_of(member.member for member in status.members)
    devices = f"{status.gpus} {device_word(status.device, status.gpus)}"
    where = f"ensemble {status.ensemble} of {len(status.members)} members on site {status.site}"
    members, *others = status_sections(status, None)
    report = Report(
        title=status.run,
        state=status.state,
        about=[
            status.reason,
            f"{where}, {devices}, planner {status.planner}; {describe_time(status)}",
            describe_usage(status),
            *([describe_comparison(status)] if status.comparison else []),
        ],
        figures=_figures(status),
        sections=[
            *_charts(status, search, colours),
            replace(members, title="Members"),
            *others,
            *_more_tables(status),
        ],
        colours=colours,
    )
    return render(report)


def _charts(status: RunStatus, search: SearchStatus | None, colours: Mapping[str, str]) -> Iterator[Section]:
    device, devices = device_word(status.device, 1), device_word(status.device)
    if status.tasks:
        about = (
            f"One row for each {device}; a bar is a member's task, with its name or number; pale while it"
            " runs. A thin line starts a round; white is time without a job."
        )
        title = f"{devices[0].upper()}{devices[1:]} over time"
        yield gantt_section(title, about, status, colours, RUN)
    else:
        yield Section(notes=[("No task has started yet; figures appear as members train.", "")])
    if status.hops:
        yield hop_section(status.hops, colours)
    if status.comparison:
        about = " ".join(("The same epochs at the rates seen.", *describe_clusters(status)))
        clusters = clusters_svg(status.comparison) if status.comparison.clusters else ""
        yield Section("On a cluster, simulated", about, clusters)
    if any(status.history.values()):
        faint = f" The {BOLD_MEMBERS} best are bold." if len(colours) > BOLD_MEMBERS else ""
        about = f"A dot ends the curve of a converged member, a cross that of a failed one.{faint}"
        charts = learning_svgs(status, colours)
        yield Section("Learning curves", about, charts=charts, legend=legend(colours))
    yield from _configs(status, search)
    if status.shares:
        rest = f" The {MOST_SHARES} longest are drawn." if len(status.shares) > MOST_SHARES else ""
        about = (
            "Time of each member in tasks. Checkpoints are written beside the training; only waits for them"
            f" count. The rest is of epochs that were trained again, of ends, and of waits between.{rest}"
        )
        parts = [(swatch(colour), part) for part, (colour, _) in SHARES.items() if part != "rest"]
        yield Section(
            "Where the time went", about, shares_svg(status.shares), [*parts, (IDLE_MARK[0], "rest")]
        )
    if search and (front := pareto_svg(search)):
        about = (
            "A dot for each trial, by its last values; the dark ones are on the Pareto front: no other trial"
            " is as good in all of them, and better in one."
        )
        yield Section("Pareto front", about, front)
    if status.balances:
        about = (
            "Left: samples of each worker in a step; right: time of the slowest worker, with t*, the least"
            " time of any split of the batch, dashed. Gain over equal batches: "
        )
        chart = balance_svg(status.balances[:MOST_HISTORIES])
        gains = [
            f"{one.member} {one.gain:.2f} ({one.iteration_s:.3g} s instead of {one.equal_batches_s:.3g} s)"
            for one in status.balances
        ]
        yield Section("Balanced batches", f"{about}{some_of(gains, MOST_HISTORIES)}.", chart)
    yield from _stage_charts(status, device)
    if judged := comparable(status):
        about = (
            "Time of converged members in tasks, over all rounds: start-up, training, evaluation and"
            " checkpoints."
        )
        yield Section("Predicted against measured time", about, accuracy_svg(judged, colours))


def _configs(status: RunStatus, search: SearchStatus | None) -> Iterator[Section]:
    """Yield a chart of configs and their best values, and of a search that of the best so far."""
    found, metric = configured(status, search)
    if chart := configs_svg(found, metric):
        about = (
            f"A line for each {'trial' if search else 'member'}, from the values of its config to its best"
            f" {metric}; the darker, the better."
        )
        shares = describe_importance(search) if search else ""
        important = f" Importance of the keys (PED-ANOVA): {shares}." if shares else ""
        title = f"Trials of {search.method}" if search else "Configs"
        yield Section(title, about + important, chart)
    if search and any(status.history.values()):
        charts = best_so_far_svgs([status], search.metric, search.mode)
        yield Section("Best so far", "The best value of all trials by then.", charts=charts)


def _stage_charts(status: RunStatus, device: str) -> Iterator[Section]:
    trained = [(one, one.last) for one in status.pipelines if one.last]
    rest = f" Of {len(trained)} members the first {MOST_PIPELINES} are drawn."
    about = (
        "Shares of each stage's time in the last epoch, by virtual worker and stage, with node and"
        f" {device}, and layers. The last stage runs both passes of a minibatch in one, drawn as forward."
        " First stages wait for waves of other virtual workers (the clock distance D); idle is all other"
        " time without a pass: the pipeline fills or drains, or another stage is slower."
        f"{rest if len(trained) > MOST_PIPELINES else ''}"
    )
    parts = [(swatch(colour), part) for part, (colour, _) in PARTS.items() if part != "idle"]
    for number, (one, last) in enumerate(trained[:MOST_PIPELINES]):
        figures = f"epoch {last.epoch}, {format_seconds(last.duration_s)}"
        yield Section(
            f"Stages of {one.member}: {describe_layout(one.layout)}; {figures}",
            about if number == 0 else "",
            stage_svg(number, one.member, last),
            [*parts, IDLE_MARK],
        )


def _more_tables(status: RunStatus) -> Iterator[Section]:
    """Yield the tables that a terminal has no room for."""
    if status.hops:
        rows = [
            (
                *(format_seconds(plan.start_s), plan.reason, plan.scheduler, str(plan.workers)),
                *map(format_seconds, (plan.lower_bound_s, plan.predicted_s, plan.measured_s)),
            )
            for plan in status.hops.plans
        ]
        about = (
            "Times from each plan to the end of its visits; the bound is the least possible of these times."
        )
        headers = (">at", "reason", "scheduler", ">workers", ">bound", ">predicted", ">measured")
        yield Section("Hops, predicted and measured", about, headers=headers, rows=rows)
    if status.wave_checks:
        about = (
            "Most updates that a minibatch missed of its own virtual worker (local) and of any other"
            " (global), and the bounds of N_m minibatches in flight and the clock distance D, in all rounds."
        )
        yield replace(wave_check_table(status.wave_checks), title="Staleness in pipelines", about=about)
    if kept := [member for member in status.members if member.best_epoch is not None]:
        about = "`hetctl export` writes them as files that PyTorch or Keras loads."
        yield Section(
            *("Kept checkpoints", about),
            headers=("member", ">best epoch", "checkpoint"),
            rows=[(member.member, str(member.best_epoch), member.best_checkpoint) for member in kept],
            fold="checkpoint",
            closed=True,
        )
    if status.rounds:
        rows = [
            (
                *(str(span.index), str(span.job)),
                *map(format_seconds, (span.start_s, span.predicted_s)),
                format_seconds(None if span.end_s is None else span.end_s - span.start_s),
                span.ended_by or "still running",
            )
            for span in status.rounds
        ]
        columns = (">round", ">job", ">start", ">predicted", ">measured", "ended by")
        yield Section("Rounds", headers=columns, rows=rows, closed=len(rows) > MOST_OPEN)


def _figures(status: RunStatus) -> list[tuple[str, str, str]]:
    error = prediction_error(status.predicted_s, status.measured_s) if status.state == "finished" else None
    judged = "" if error is None else describe_error(error)
    about = "no rate was known" if status.predicted_s is None else judged
    rounds = counted(len(status.rounds), "round")
    jobs = counted(len({span.job for span in status.rounds}), "job")
    done = sum(member.state == "converged" for member in status.members)
    others = describe_states(status, STATES[1:]) or "every member"
    busy = format_percent(busy_fraction(status))
    order = ranked(status)
    best = (f"best {order[0].metric}", format_metric(order[0].best), order[0].member) if order else None
    return [
        ("measured", format_seconds(status.measured_s), f"{rounds} in {jobs}"),
        ("predicted", format_seconds(status.predicted_s), about),
        (f"{device_word(status.device)} busy", busy, "while jobs held them"),
        ("converged", f"{done} of {len(status.members)}", others),
        best or ("best member", NONE, "not known yet"),
    ]


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
