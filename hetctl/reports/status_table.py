"""Terminal output of a run's status, with its hops, and of its search; readable at 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hetctl.model.hops import HopForecast, HopStatus
from hetctl.model.job import Job, JobState
from hetctl.model.run_status import MemberStatus, RunStatus
from hetctl.model.searches import SearchStatus
from hetctl.model.training_progress import LiveMetrics, RankShare
from hetctl.reports.pipeline_tables import pipeline_tables
from hetctl.reports.style import ruled_table
from hetctl.reports.summary import (
    FailureGroup,
    describe_batches,
    describe_config,
    describe_states,
    describe_time,
    failures_of,
    gpus_by_round,
    named,
)
from hetctl.reports.units import (
    NONE,
    device_word,
    format_metric,
    format_percent,
    format_rate,
    format_seconds,
    printable,
)

NARROW = 80
WIDE_ONLY = frozenset({">rate\nprof.", ">time\npredicted"})
"""Columns of the member table that narrower terminals have no room for."""
MOST_TRIALS = 5
"""Trials whose configs are shown, the best ones."""
MOST_RANKS = 8
"""Ranks of a group that are shown, the slowest first."""
UNEVEN = 1.1
"""Ratio of the times of two ranks beyond which a group counts as uneven."""
ROUNDS_WIDTH = 7  # four rounds of one-digit GPU counts
MEMBER_STYLES = {
    "converged": "green",
    "training": "cyan",
    "waiting": "dim",
    "stopped": "dim",
    "failed": "bold red",
}
RUN_STYLES = {"finished": "green", "running": "cyan", "failed": "bold red", "stalled": "bold red"}


def status_table(status: RunStatus, width: int = NARROW) -> RenderableType:
    """Return the status of a run: its state, one line per member, and the causes of failures.

    Parameters
    ----------
    width : int
        Columns of the terminal; those beyond 80 are used for more rounds. With fewer than 80 the columns
        `WIDE_ONLY` are left out.
    """
    rest = len(status.states) - len(status.members)
    more = [Text(f"and {rest:,} more members, which `hetctl status --json` has", "dim")] if rest else []
    held = device_word(status.device)
    rates = ", profiled and seen" if width >= NARROW else ""
    note = Text(f"rate: samples/s on the {held} held last{rates}; best: of all epochs", "dim")
    warnings = [Text(printable(warning), "yellow") for warning in status.warnings]
    return Group(
        _status_header(status),
        Text(),
        _member_table(status, width),
        *more,
        note,
        *_batch_lines(status),
        *warnings,
        *_live_table(status),
        *_trial_table(status),
        *pipeline_tables(status.pipelines),
        *(hop_tables(status.hops) if status.hops else ()),
        *(_failure(group) for group in failures_of(status)),
    )


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
        (status.state, RUN_STYLES.get(status.state, "yellow")),
        printable(f"{reason} · {' · '.join(where)}\n"),
        f"{describe_time(status)}\n{describe_states(status)}",
        printable(_early_ends(status.jobs)),
    )


def _early_ends(jobs: Sequence[Job]) -> str:
    """Return a line on jobs that ended early, with the reasons; empty if there are none."""
    ends = [
        f"job {job.number} {job.state.value}{f' ({reason})' if (reason := job.shown_reason) else ''}"
        for job in jobs
        if job.state.over and job.state is not JobState.FINISHED
    ]
    return f"\nended early: {', '.join(ends)}" if ends else ""


def _member_table(status: RunStatus, width: int) -> Table:
    columns = _member_columns(status, ROUNDS_WIDTH + max(0, width - NARROW))
    shown = {header: cell for header, cell in columns.items() if width >= NARROW or header not in WIDE_ONLY}
    rows = ([cell(member) for cell in shown.values()] for member in status.members)
    return ruled_table(shown, rows, fold="member")


def _member_columns(status: RunStatus, rounds_width: int) -> dict[str, Callable[[MemberStatus], str | Text]]:
    """Return the columns of the member table: headers, and functions that return a member's cell."""
    metrics = sorted({member.metric for member in status.members})

    def rate_of(member: MemberStatus, kind: str) -> str:
        return format_rate(getattr(member.last_rate, kind, None))

    def best_of(member: MemberStatus) -> Text:
        best = format_metric(member.best)
        return Text(best if len(metrics) == 1 else printable(f"{member.metric}\n{best}"))

    return {
        "member": lambda member: member.member,
        "state": lambda member: Text(member.state, MEMBER_STYLES.get(member.state, "")),
        f"{device_word(status.device)}\nper round": lambda member: gpus_by_round(
            member.gpus_by_round, rounds_width
        ),
        ">rate\nprof.": lambda member: rate_of(member, "profiled"),
        ">rate\nseen": lambda member: rate_of(member, "seen"),
        ">epochs": lambda member: f"{member.epochs}/{member.max_epochs}",
        _best_header(metrics[0]) if len(metrics) == 1 else ">best": best_of,
        ">time\npredicted": lambda member: format_seconds(member.predicted_s),
        ">time\nmeasured": lambda member: format_seconds(member.measured_s),
    }


def _trial_table(status: RunStatus) -> list[RenderableType]:
    """Return a table of the configs of the best trials; empty if no member is a trial."""
    trials = [member for member in status.members if member.config is not None]
    if not trials:
        return []
    known = sorted((trial for trial in trials if trial.best is not None), key=lambda trial: trial.rank)
    rows = (
        (
            trial.member,
            Text(trial.state, MEMBER_STYLES.get(trial.state, "")),
            f"{trial.epochs}/{trial.max_epochs}",
            format_metric(trial.best),
            describe_config(trial.config or {}),
        )
        for trial in known[:MOST_TRIALS]
    )
    headers = ("best\ntrials", "\nstate", ">\nepochs", ">\nbest", "\nconfig")
    return [Text(), ruled_table(headers, rows, fold="\nconfig")]


def _batch_lines(status: RunStatus) -> list[Text]:
    """Return a line for each member whose global batch has changed."""
    described = [(member.member, describe_batches(member, status.device)) for member in status.members]
    return [Text(printable(f"{name}: {changes}"), "dim") for name, changes in described if changes]


def _live_table(status: RunStatus) -> list[RenderableType]:
    """Return a table of live metrics of members in training; empty if there are none."""
    alive = [(member.member, member.live_metrics) for member in status.members if member.live_metrics]
    if not alive:
        return []
    first, use = "in training\njust now", f">{device_word(status.device, 1)}\nin use"
    rows = (
        (
            name,
            format_rate(metrics.rate),
            str(metrics.epoch),
            format_percent(metrics.position / metrics.samples if metrics.samples else None),
            format_metric(metrics.loss),
            format_percent(metrics.gpu_busy_fraction),
        )
        for name, metrics in alive
    )
    headers = (first, ">\nsamples/s", ">\nepoch", ">epoch\ndone", ">\nloss", use)
    return [Text(), ruled_table(headers, rows, fold=first), *_rank_table(alive)]


def _rank_table(alive: Sequence[tuple[str, LiveMetrics]]) -> list[RenderableType]:
    """Return a table of the ranks of groups whose batches or times differ; empty if there are none."""
    differing = [(name, metrics.ranks) for name, metrics in alive if _differ(metrics.ranks)]
    if not differing:
        return []
    headers = ("ranks of\nuneven speed", "\nworker", ">\nbatch", ">\nown time", ">of the\nslowest")
    rows = []
    for name, ranks in differing:
        slowest_s = max(rank.step_s for rank in ranks)
        shown = sorted(ranks, key=lambda rank: -rank.step_s)
        for row, rank in enumerate(shown[:MOST_RANKS]):
            share = format_percent(rank.step_s / slowest_s)
            times = (f"{rank.batch:,}", f"{rank.step_s:.3g} s", share)
            rows.append((name if row == 0 else "", rank.worker, *times))
        if len(shown) > MOST_RANKS:
            rows.append(("", f"and {len(shown) - MOST_RANKS} faster ones", "", "", ""))
    return [Text(), ruled_table(headers, rows, fold="\nworker")]


def _differ(ranks: Sequence[RankShare]) -> bool:
    """Return true if ranks have different batches, or take times that call for them."""
    if not ranks:
        return False
    seconds = [rank.step_s for rank in ranks]
    return len({rank.batch for rank in ranks}) > 1 or max(seconds) > UNEVEN * min(seconds)


def _best_header(metric: str) -> str:
    """Return ``best val_accuracy`` broken into two lines."""
    head, underscore, tail = printable(metric).rpartition("_")
    return f">best {head}{underscore}\n{tail}"


def _failure(group: FailureGroup) -> RenderableType:
    title = Text.assemble(
        "\n", (printable(named(group.names)), "bold red"), printable(f" failed: {group.reason}")
    )
    lines = "\n".join(printable(line) for line in (*group.log_tail, group.log))
    return Group(title, Padding(Text(lines, "dim", overflow="fold"), (0, 0, 0, 2), expand=False))


MOST_WORKERS = 32
"""Workers that are shown."""
PASSES = {True: "evaluating", False: "training"}
VISITS = (">visits\ndone", ">\nrepeated")


def hop_tables(hops: HopStatus) -> list[RenderableType]:
    """Return tables of the members that hop and of the workers, and a line on the last plan."""
    return [Text(), _hop_members(hops), Text(), _hop_workers(hops), *_last_plan(hops.plans)]


def _hop_members(hops: HopStatus) -> RenderableType:
    rows = (
        (
            member.member,
            str(member.epoch),
            NONE if member.ended else PASSES[member.evaluating],
            NONE if member.ended else f"{member.visited}/{member.partitions}",
            member.worker or NONE,
            f"{member.visits:,}",
            f"{member.repeated:,}",
        )
        for member in hops.members
    )
    first = "members\nthat hop"
    headers = (first, ">\nepoch", "\npass", ">partitions\nvisited", "\nworker", *VISITS)
    return ruled_table(headers, rows, gap=1, fold=first)


def _hop_workers(hops: HopStatus) -> RenderableType:
    hidden = len(hops.workers) - MOST_WORKERS
    rows = (
        (
            worker.worker,
            format_percent(worker.gpu_busy_fraction),
            format_percent(worker.waiting_fraction),
            format_seconds(worker.hop_s),
            f"{worker.visits:,}",
            f"{worker.repeated:,}",
        )
        for worker in hops.workers[:MOST_WORKERS]
    )
    more = [(f"and {hidden:,} more", *[""] * 5)] if hidden > 0 else []
    first = "workers\nof hops"
    headers = (first, ">\nbusy", ">\nwaiting", ">mean hop\nof nodes", *VISITS)
    return ruled_table(headers, [*rows, *more], gap=1, fold=first)


def _last_plan(plans: Sequence[HopForecast]) -> list[RenderableType]:
    return [Text(printable(describe_plan(plan)), "dim") for plan in plans[-1:]]


def describe_plan(plan: HopForecast) -> str:
    """Return a line that compares a plan's prediction and bound with the visits so far."""
    times = [plan.predicted_s, plan.lower_bound_s, plan.measured_s]
    predicted, bound, measured = map(format_seconds, times)
    return (
        f"hops planned by {plan.scheduler} for {plan.workers} workers ({plan.reason}): predicted {predicted},"
        f" bound {bound}, so far {measured}"
    )


def search_table(search: SearchStatus, most: int) -> RenderableType:
    """Return the best trials of a search, at most `most`, with their configs."""
    shown = search.trials[:most]
    rest = len(search.trials) - len(shown)
    rows = (
        (
            trial.member,
            Text(trial.state, MEMBER_STYLES.get(trial.state, "")),
            f"{trial.epochs}/{trial.asked}",
            format_metric(trial.best),
            format_metric(trial.last),
            describe_config(trial.config),
            trial.parent or "",
        )
        for trial in shown
    )
    headers = ("trial", "state", ">epochs", ">best", ">last", "config", "parent")
    table = ruled_table(headers, rows, fold="config")
    more = [Text(f"and {rest:,} more trials, which `hetctl search export` has", "dim")] if rest else []
    if search.importance:
        shares = ", ".join(f"{key} {format_percent(share)}" for key, share in search.importance.items())
        more.append(Text(printable(f"importance for {search.metric}: {shares}")))
    return Group(Text(printable(_head(search)), "bold"), table, *more)


def _head(search: SearchStatus) -> str:
    best = "most" if search.mode == "max" else "least"
    state = f"ended: {search.ended}" if search.ended else "under way"
    return (
        f"run {search.run} · search {search.method}"
        f" · {len(search.trials)} of at most {search.max_trials} trials"
        f" · {best} {search.metric} first · {state}"
    )
