"""A run's status, with its hops and its search, as sections for terminal and page; readable at 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.text import Text

from hetctl.model.hops import HopForecast, HopStatus
from hetctl.model.job import Job, JobState
from hetctl.model.run_status import MOST_MEMBERS, MemberStatus, RunStatus
from hetctl.model.searches import SearchStatus, TrialStatus
from hetctl.model.seed_groups import SeedGroup, Spread
from hetctl.model.training_progress import LiveMetrics, RankShare
from hetctl.reports.pipeline_tables import pipeline_sections
from hetctl.reports.sections import Note, Section, more, stacked
from hetctl.reports.summary import (
    describe_batches,
    describe_config,
    describe_states,
    describe_time,
    describe_usage,
    failures_of,
    gpus_by_round,
    names_text,
)
from hetctl.reports.units import (
    GUESS_NOTE,
    NONE,
    device_word,
    format_metric,
    format_percent,
    format_rate,
    format_seconds,
    printable,
)

NARROW = 80
PROFILED = ">rate\nprof."
WIDE_ONLY = PROFILED, ">time\npredicted"
"""Columns of the member table that are left out where they are empty, or the terminal is narrow."""
KEPT = ">best\nkept"
"""Column of the member table with the best epoch whose checkpoint is kept."""
KEPT_WIDTH = 7
"""Columns of the terminal that it needs beyond `NARROW`."""
HOURS, CONFIG, REASON = ">hours", "config", "reason of its end"
PAGE_ONLY = frozenset({HOURS, CONFIG, REASON})
"""Columns of the member table that only a page has room for."""
FRONT = "●"
"""Mark of a trial on the Pareto front."""
MOST_TRIALS = 5
"""Trials whose configs are shown, the best ones."""
MOST_RANKS = 8
"""Ranks of a group that are shown, the slowest first."""
UNEVEN = 1.1
"""Ratio of the times of two ranks beyond which a group counts as uneven."""
ROUNDS_WIDTH, PAGE_ROUNDS_WIDTH = 7, 31
"""Characters for the GPUs by round, on a narrow terminal and on a page."""
MOST_WORKERS = 32
"""Workers of hops that a terminal shows."""
STYLES = {
    "converged": "green",
    "training": "cyan",
    "waiting": "dim",
    "paused": "yellow",
    "stopped": "dim",
    "cancelled": "dim",
    "failed": "bold red",
    "finished": "green",
    "running": "cyan",
    "stalled": "bold red",
}
"""Styles of states of members and runs."""


def status_table(
    status: RunStatus, width: int = NARROW, *, first: int = 0, chosen: int | None = None
) -> RenderableType:
    """Return the status of a run: its state, one line per member, and the causes of failures.

    Parameters
    ----------
    width : int
        Columns of the terminal; those beyond 80 are used for more rounds. With fewer than 80 the columns
        `WIDE_ONLY` are left out, and wherever they would be empty.
    first : int
        Number of the first member that is shown.
    chosen : int or None
        Number of the member that is shown in reverse.
    """
    members, *others = status_sections(replace(status, members=status.members[first:]), width)
    at = None if chosen is None else chosen - first
    return stacked([_status_header(status), replace(members, chosen=at), *others])


def status_sections(status: RunStatus, width: int | None) -> Iterator[Section]:
    """Yield the sections of a run.

    Parameters
    ----------
    width : int or None
        Columns of the terminal; None: for a page.
    """
    yield _members(status, width)
    alive = [(member.member, member.live_metrics) for member in status.members if member.live_metrics]
    if alive:
        yield _live(alive, status.device)
    if uneven := [(name, metrics.ranks) for name, metrics in alive if _differ(metrics.ranks)]:
        yield _ranks(uneven)
    if trials := [trial for trial in status.members if trial.is_trial and trial.best is not None]:
        yield _best_trials(trials)
    if status.seeds:
        yield _seeds(status.seeds)
    yield from pipeline_sections(status.pipelines, on_page=width is None)
    if status.hops:
        yield from _hops(status.hops, on_page=width is None)
    for group in failures_of(status):
        title = f"{names_text(group.names)} failed: {group.reason}"
        yield Section(title, log=(*group.log_tail, group.log))


def _status_header(status: RunStatus) -> Text:
    names = f"run {status.run} · ensemble {status.ensemble} · site {status.site} · planner {status.planner}"
    devices = f"{status.gpus} {device_word(status.device, status.gpus)}"
    where = [f"round {status.rounds[-1].index}"] if status.rounds else ["no round yet"]
    for job in status.jobs[-1:]:
        lost = f"without {', '.join(job.failed_nodes)}" if job.failed_nodes and not job.state.over else ""
        where.append(f"job {job.number} ({', '.join(filter(None, (job.batch_id, job.state.value, lost)))})")
    reason = f": {status.reason}" if status.reason else ""
    return Text.assemble(
        (printable(f"{names} · {devices}\n"), "bold"),
        (status.state, STYLES.get(status.state, "yellow")),
        printable(f"{reason} · {' · '.join(where)}\n"),
        f"{describe_time(status)}\n{describe_usage(status)}\n{describe_states(status)}",
        printable(_early_ends(status.jobs)),
    )


def _early_ends(jobs: Sequence[Job]) -> str:
    ends = [
        f"job {job.number} {job.state.value}{f' ({reason})' if (reason := job.shown_reason) else ''}"
        for job in jobs
        if job.state.over and job.state is not JobState.FINISHED
    ]
    return f"\nended early: {', '.join(ends)}" if ends else ""


def _members(status: RunStatus, width: int | None) -> Section:
    held = device_word(status.device)
    columns = _member_columns(status, width)
    if width is not None:
        columns = {header: cell for header, cell in columns.items() if header not in PAGE_ONLY}
    elif not any(member.config for member in status.members):
        del columns[CONFIG]
    if not _shows_kept(status, width):
        del columns[KEPT]
    is_wide = width is None or width >= NARROW
    for header in WIDE_ONLY:
        if not is_wide or all(columns[header](member) == NONE for member in status.members):
            del columns[header]
    rest = more(len(status.states) - len(status.members), "more members, which `hetctl status --json` has")
    rates = ", profiled and seen" if PROFILED in columns else ""
    kept = "; best kept: epoch whose checkpoint stays" if KEPT in columns else ""
    note = f"rate: samples/s on the {held} held last{rates}; best: of all epochs{kept}"
    if width is None:
        note += f"; hours: of all its {held}; a click on a header sorts"
    has_guess = any(member.last_rate and not member.last_rate.rate_known for member in status.members)
    described = [(member.member, describe_batches(member, status.device)) for member in status.members]
    return Section(
        headers=list(columns),
        rows=[[cell(member) for cell in columns.values()] for member in status.members],
        fold=("member", CONFIG, REASON),
        gap=0,
        notes=[
            *rest,
            (note, "dim"),
            *([(GUESS_NOTE, "dim")] if has_guess and PROFILED in columns else []),
            *((f"{name}: {changes}", "dim") for name, changes in described if changes),
            *((warning, "yellow") for warning in status.warnings),
        ],
    )


def _shows_kept(status: RunStatus, width: int | None) -> bool:
    """Return true if checkpoints of best epochs are kept, and there is room to tell."""
    has_room = width is None or width >= NARROW + KEPT_WIDTH
    return has_room and any(member.best_epoch is not None for member in status.members)


def _member_columns(status: RunStatus, width: int | None) -> dict[str, Callable[[MemberStatus], str | Text]]:
    """Return the columns of the member table: headers, and functions that return a member's cell."""
    metrics = sorted({member.metric for member in status.members})
    spare = 0 if width is None else max(0, width - NARROW - KEPT_WIDTH * _shows_kept(status, width))
    rounds_width = PAGE_ROUNDS_WIDTH if width is None else ROUNDS_WIDTH + spare
    # ``best val_accuracy`` is broken into two lines.
    head, underscore, tail = metrics[0].rpartition("_") if metrics else ("", "", "")
    shared = len(metrics) == 1
    return {
        "member": lambda member: member.member,
        "state": _state,
        f"{device_word(status.device)}\nper round": lambda member: gpus_by_round(
            member.gpus_by_round, rounds_width
        ),
        PROFILED: _planned_rate,
        ">rate\nseen": lambda member: format_rate(getattr(member.last_rate, "seen", None)),
        ">epochs": _epochs,
        f">best {head}{underscore}\n{tail}" if shared else ">best": lambda member: (
            format_metric(member.best) if shared else f"{member.metric}\n{format_metric(member.best)}"
        ),
        KEPT: lambda member: NONE if member.best_epoch is None else str(member.best_epoch),
        ">time\npredicted": lambda member: format_seconds(member.predicted_s),
        ">time\nmeasured": lambda member: format_seconds(member.measured_s),
        HOURS: lambda member: f"{member.gpu_seconds / 3600:,.3f}",
        CONFIG: lambda member: describe_config(member.config),
        REASON: lambda member: member.reason or "",
    }


def _planned_rate(member: MemberStatus) -> str:
    """Return the profiled rate; without one, that of earlier runs, or an estimate until a rate is seen."""
    if (rate := member.last_rate) is None:
        return NONE
    return format_rate(rate.planned if rate.profiled is None else rate.profiled, known=rate.rate_known)


def _state(one: MemberStatus | TrialStatus) -> Text:
    return Text(one.state, STYLES.get(one.state, ""))


def _epochs(member: MemberStatus) -> str:
    return f"{member.epochs}/{member.max_epochs}"


def _best_trials(trials: Sequence[MemberStatus]) -> Section:
    known = sorted(trials, key=lambda trial: trial.rank)
    rows = [
        (
            trial.member,
            _state(trial),
            _epochs(trial),
            format_metric(trial.best),
            describe_config(trial.config),
        )
        for trial in known[:MOST_TRIALS]
    ]
    headers = ("member", "state", ">epochs", ">best", "config")
    return Section("Best trials", headers=headers, rows=rows, fold="config", gap=0)


def _seeds(groups: Sequence[SeedGroup]) -> Section:
    rows = [
        (group.group, f"{group.best.count if group.best else 0}/{len(group.members)}", *_spread(group.best))
        for group in groups[:MOST_MEMBERS]
    ]
    metrics = ", ".join(dict.fromkeys(group.metric for group in groups))
    headers = ("member", ">seeds", ">mean", ">95 %", ">deviation")
    return Section(f"Best {metrics} over seeds", headers=headers, rows=rows, fold="member")


def _spread(of: Spread | None) -> tuple[str, str, str]:
    if of is None:
        return NONE, NONE, NONE
    half = NONE if of.half_width is None else f"± {format_metric(of.half_width)}"
    return format_metric(of.mean), half, format_metric(of.deviation)


def _live(alive: Sequence[tuple[str, LiveMetrics]], device: str) -> Section:
    rows = [
        (
            name,
            format_rate(metrics.rate),
            str(metrics.epoch),
            format_percent(metrics.position / metrics.samples if metrics.samples else None),
            format_metric(metrics.loss),
            format_percent(metrics.gpu_busy_fraction),
        )
        for name, metrics in alive
    ]
    use = f">{device_word(device, 1)}\nin use"
    headers = ("member", ">samples/s", ">epoch", ">epoch\ndone", ">loss", use)
    return Section("In training just now", headers=headers, rows=rows, fold="member", gap=0)


def _ranks(groups: Sequence[tuple[str, Sequence[RankShare]]]) -> Section:
    rows = []
    for name, ranks in groups:
        slowest_s = max(rank.step_s for rank in ranks)
        for row, rank in enumerate(sorted(ranks, key=lambda rank: -rank.step_s)[:MOST_RANKS]):
            times = (f"{rank.step_s:.3g} s", format_percent(rank.step_s / slowest_s))
            rows.append((name if row == 0 else "", rank.worker, f"{rank.batch:,}", *times))
        if len(ranks) > MOST_RANKS:
            rows.append(("", f"and {len(ranks) - MOST_RANKS} faster ones", "", "", ""))
    headers = ("member", "worker", ">batch", ">own time", ">of the\nslowest")
    return Section("Ranks of uneven speed", headers=headers, rows=rows, fold="worker", gap=0)


def _differ(ranks: Sequence[RankShare]) -> bool:
    """Return true if ranks have different batches, or take times that call for them."""
    seconds = [rank.step_s for rank in ranks]
    return bool(ranks) and (len({rank.batch for rank in ranks}) > 1 or max(seconds) > UNEVEN * min(seconds))


def _hops(hops: HopStatus, *, on_page: bool) -> Iterator[Section]:
    members = [
        (
            member.member,
            str(member.epoch),
            NONE if member.ended else "evaluating" if member.evaluating else "training",
            NONE if member.ended else f"{member.visited}/{member.partitions}",
            member.worker or NONE,
            f"{member.visits:,}",
            f"{member.repeated:,}",
        )
        for member in hops.members
    ]
    visits = (">visits\ndone", ">\nrepeated")
    headers = ("member", ">epoch", "pass", ">partitions\nvisited", "worker", *visits)
    yield Section("Members that hop", headers=headers, rows=members, fold="member")
    shown = hops.workers if on_page else hops.workers[:MOST_WORKERS]
    workers = [
        (
            worker.worker,
            format_percent(worker.gpu_busy_fraction),
            format_percent(worker.waiting_fraction),
            format_seconds(worker.hop_s),
            f"{worker.visits:,}",
            f"{worker.repeated:,}",
        )
        for worker in shown
    ]
    rest = more(len(hops.workers) - len(shown), "more")
    last = [] if on_page else [(describe_plan(plan), "dim") for plan in hops.plans[-1:]]
    columns = ("worker", ">busy", ">waiting", ">mean hop\nof nodes", *visits)
    yield Section("Workers of hops", headers=columns, rows=workers, fold="worker", notes=[*rest, *last])


def describe_plan(plan: HopForecast) -> str:
    """Return a line that compares a plan's prediction and bound with the visits so far."""
    times = [plan.predicted_s, plan.lower_bound_s, plan.measured_s]
    predicted, bound, measured = map(format_seconds, times)
    return (
        f"hops planned by {plan.scheduler} for {plan.workers} workers ({plan.reason}): predicted {predicted},"
        f" bound {bound}, so far {measured}"
    )


def search_table(search: SearchStatus, most: int) -> Section:
    """Return the best trials of a search, at most `most`, with their configs."""
    front_first = sorted(search.trials, key=lambda trial: not trial.on_front)
    rows = [
        (
            trial.member,
            _state(trial),
            f"{trial.epochs}/{trial.asked}",
            format_metric(trial.best),
            format_metric(trial.last),
            *(format_metric(trial.also.get(metric)) for metric in search.also),
            *((FRONT if trial.on_front else "",) if search.also else ()),
            describe_config(trial.config),
            trial.parent or "",
        )
        for trial in front_first[:most]
    ]
    also = (*(f">last\n{metric}" for metric in search.also), "front") if search.also else ()
    best = "most" if search.mode == "max" else "least"
    notes: list[Note] = []
    if search.also:
        named = ", ".join((search.metric, *search.also))
        notes += [(f"{FRONT} on the Pareto front of the last values of {named}; these come first", "dim")]
    notes += more(len(search.trials) - most, "more trials, which `hetctl search export` has")
    if search.importance:
        notes += [(f"importance for {search.metric}: {describe_importance(search)}", "")]
    return Section(
        f"run {search.run} · search {search.method}"
        f" · {len(search.trials)} of at most {search.max_trials} trials"
        f" · {best} {search.metric} first · {f'ended: {search.ended}' if search.ended else 'under way'}",
        headers=("trial", "state", ">epochs", ">best", ">last", *also, "config", "parent"),
        rows=rows,
        fold="config",
        gap=0,
        notes=notes,
    )


def describe_importance(search: SearchStatus) -> str:
    """Return the shares of the keys of the configs."""
    return ", ".join(f"{key} {format_percent(share)}" for key, share in search.importance.items())
