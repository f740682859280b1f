"""Terminal output: functions from one value to one rich renderable, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hetctl.model.job import Job, JobState
from hetctl.model.profile import PreprocessPoint, ProfilePoint
from hetctl.model.run_status import MemberStatus, RunStatus
from hetctl.model.site import Site
from hetctl.report.plan_table import plan_table
from hetctl.report.summary import describe_states, describe_time, gpus_by_round
from hetctl.report.table_style import ruled_table
from hetctl.report.units import (
    NONE,
    device_word,
    format_bytes,
    format_metric,
    format_percent,
    format_rate,
    format_seconds,
    printable,
)

__all__ = ["plan_table", "profile_table", "sites_table", "status_table"]

NARROW = 80
WANTED_ERROR = 0.03
"""Relative error of a rate above which its point is named in a warning."""
ROUNDS_WIDTH = 7  # four rounds of one-digit GPU counts
COUNTS_PER_BLOCK = 8
MEMBER_STYLES = {"converged": "green", "training": "cyan", "waiting": "dim", "failed": "bold red"}
RUN_STYLES = {"finished": "green", "running": "cyan", "failed": "bold red"}


def status_table(status: RunStatus, width: int = NARROW) -> RenderableType:
    """Return the status of a run: its state, one line per member, and the causes of failures.

    Parameters
    ----------
    width : int
        Columns of the terminal; columns beyond 80 are used for more rounds.
    """
    failures = [_failure(member) for member in status.members if member.state == "failed"]
    rest = len(status.states) - len(status.members)
    more = [Text(f"and {rest:,} more members, which `hetctl status --json` has", "dim")] if rest else []
    held = device_word(status.device)
    note = Text(f"rate: samples/s on the {held} held last, profiled and seen; best: of all epochs", "dim")
    warnings = [Text(printable(warning), "yellow") for warning in status.warnings]
    return Group(
        _status_header(status),
        Text(),
        _member_table(status, ROUNDS_WIDTH + max(0, width - NARROW)),
        *more,
        note,
        *warnings,
        *_live_table(status),
        *failures,
    )


def profile_table(
    points: Sequence[ProfilePoint],
    stale: Collection[tuple[str, int]],
    preprocess: Sequence[PreprocessPoint],
    device: str = "gpu",
) -> RenderableType:
    """Return tables of a profile: rates by number of GPUs, and the other times of a step.

    Parameters
    ----------
    stale : collection of (member, gpus)
        Points measured on another machine, or before the member was edited.
    """
    counts = sorted({point.gpus for point in points})
    blocks = [counts[i : i + COUNTS_PER_BLOCK] for i in range(0, len(counts), COUNTS_PER_BLOCK)]
    parts: list[RenderableType] = [Text(f"Training rate in samples/s, by {device_word(device)}", "bold")]
    for block in blocks:
        parts += [_rate_table(points, stale, block), Text()]
    if stale:
        note = "* stale: measured elsewhere or before the member changed; profile it again"
        parts += [Text(note, "yellow"), Text()]
    if doubts := _doubts(points):
        parts += [*(Text(printable(doubt), "yellow") for doubt in doubts), Text()]
    parts += [Text("Costs of a step besides training, the largest measured", "bold"), _cost_table(points)]
    if preprocess:
        parts += [Text(), Text("Preprocessing in samples/s, by cores", "bold"), _preprocess_table(preprocess)]
    machines = sorted({printable(point.machine.gpu_type) for point in points})
    return Group(*parts, Text(f"\nMeasured on {', '.join(machines) or 'nothing yet'}", "dim"))


def _doubts(points: Sequence[ProfilePoint]) -> list[str]:
    """Return texts on the points whose steps varied in time."""
    inexact = [
        f"{point.member} on {point.gpus} ±{format_percent(point.rate_error)}"
        for point in points
        if point.rate_error is not None and point.rate_error > WANTED_ERROR
    ]
    slow = [
        f"{point.member} on {point.gpus}: {', '.join(f'{seconds:.2g} s' for seconds in point.slow_steps_s)}"
        for point in points
        if point.slow_steps_s
    ]
    return [
        f"{what}: {'; '.join(those)}"
        for what, those in (
            (f"not known within {WANTED_ERROR:.0%}, as steps vary", inexact),
            ("steps that took far too long and do not count", slow),
        )
        if those
    ]


def sites_table(sites: Iterable[tuple[Site, str]]) -> RenderableType:
    """Return a table of sites with the paths of their files."""
    table = ruled_table("site", "batch", ">nodes", "", "launcher", "where", gap=1, fold="where")
    for site, where in sites:
        devices = f"x {site.gpus_per_node} {device_word(site.device, site.gpus_per_node)}"
        words = (site.name, site.batch_system, str(site.nodes), devices, site.launcher, where)
        table.add_row(*(Text(printable(word)) for word in words))
    return table


def _status_header(status: RunStatus) -> Text:
    names = f"run {status.run} · ensemble {status.ensemble} · site {status.site} · planner {status.planner}"
    devices = f"{status.gpus} {device_word(status.device, status.gpus)}"
    where = [f"round {status.rounds[-1].index}"] if status.rounds else ["no round yet"]
    for job in status.jobs[-1:]:
        where.append(f"job {job.number} ({', '.join(filter(None, (job.batch_id, job.state.value)))})")
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
        f"job {job.number} {job.state.value}{f' ({why})' if (why := job.why) else ''}"
        for job in jobs
        if job.state.over and job.state is not JobState.FINISHED
    ]
    return f"\nended early: {', '.join(ends)}" if ends else ""


def _member_table(status: RunStatus, rounds_width: int) -> Table:
    metrics = sorted({member.metric for member in status.members})
    one_metric = len(metrics) == 1
    table = ruled_table(
        "member",
        "state",
        f"{device_word(status.device)}\nper round",
        ">rate\nprof.",
        ">rate\nseen",
        ">epochs",
        _best_header(metrics[0]) if one_metric else ">best",
        ">time\npredicted",
        ">time\nmeasured",
        fold="member",
    )
    for member in status.members:
        best, rate = format_metric(member.best), member.last_rate
        table.add_row(
            Text(printable(member.member)),
            Text(member.state, MEMBER_STYLES.get(member.state, "")),
            gpus_by_round(member.gpus_by_round, rounds_width),
            format_rate(rate.profiled if rate else None),
            format_rate(rate.seen if rate else None),
            f"{member.epochs}/{member.max_epochs}",
            Text(best if one_metric else printable(f"{member.metric}\n{best}")),
            format_seconds(member.predicted_s),
            format_seconds(member.measured_s),
        )
    return table


def _live_table(status: RunStatus) -> list[RenderableType]:
    """Return a table of live metrics of members in training; empty if there are none."""
    alive = [(member.member, member.pulse) for member in status.members if member.pulse]
    if not alive:
        return []
    use = f">{device_word(status.device, 1)}\nin use"
    table = ruled_table(
        "in training\njust now",
        ">\nsamples/s",
        ">\nepoch",
        ">epoch\ndone",
        ">\nloss",
        use,
        fold="in training\njust now",
    )
    for name, pulse in alive:
        table.add_row(
            Text(printable(name)),
            format_rate(pulse.rate),
            str(pulse.epoch),
            format_percent(pulse.position / pulse.samples),
            format_metric(pulse.loss),
            format_percent(pulse.busy),
        )
    return [Text(), table]


def _best_header(metric: str) -> str:
    """Return ``best val_accuracy`` broken into two lines."""
    head, underscore, tail = printable(metric).rpartition("_")
    return f">best {head}{underscore}\n{tail}"


def _failure(member: MemberStatus) -> RenderableType:
    cause = f" failed: {member.cause or 'cause unknown'}"
    title = Text.assemble("\n", (printable(member.member), "bold red"), printable(cause))
    log = Text("\n".join(printable(line) for line in member.log_tail), "dim", overflow="fold")
    return Group(title, Padding(log, (0, 0, 0, 2), expand=False)) if member.log_tail else title


def _rate_table(
    points: Sequence[ProfilePoint], stale: Collection[tuple[str, int]], counts: Sequence[int]
) -> Table:
    table = ruled_table("member", *(f">{count} " for count in counts), fold="member")
    rates = {(point.member, point.gpus): point.rate for point in points}
    for member in dict.fromkeys(point.member for point in points):
        marks = ["*" if (member, count) in stale else " " for count in counts]
        cells = [
            format_rate(rates.get((member, count))) + mark for count, mark in zip(counts, marks, strict=True)
        ]
        table.add_row(Text(printable(member)), *cells)
    return table


def _cost_table(points: Sequence[ProfilePoint]) -> Table:
    headers = ("member", ">batch", ">start-up", ">evaluate", ">checkpoint", ">memory")
    table = ruled_table(*headers, gap=1, fold="member")
    for name in dict.fromkeys(point.member for point in points):
        mine = [point for point in points if point.member == name]
        memory = max(point.peak_memory_bytes for point in mine)
        table.add_row(
            Text(printable(name)),
            str(mine[-1].batch_size),
            format_seconds(max(point.startup_s for point in mine)),
            format_seconds(max(point.evaluate_s for point in mine)),
            format_seconds(max(point.checkpoint_s for point in mine)),
            format_bytes(memory) if memory else NONE,
        )
    return table


def _preprocess_table(preprocess: Sequence[PreprocessPoint]) -> Table:
    table = ruled_table("cores", *(f">{point.cores}" for point in preprocess), gap=1)
    table.add_row("rate", *(format_rate(point.rate) for point in preprocess))
    return table
