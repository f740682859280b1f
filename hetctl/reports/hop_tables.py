"""Tables of a run's hops for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from hetctl.model.hops import HopForecast, HopStatus
from hetctl.reports.table_style import ruled_table
from hetctl.reports.units import NONE, format_percent, format_seconds, printable

MOST_WORKERS = 32
"""Workers that are shown."""
PASSES = {True: "evaluating", False: "training"}


def hop_tables(hops: HopStatus) -> list[RenderableType]:
    """Return tables of the members that hop and of the workers, and a line on the last plan."""
    return [Text(), _members(hops), Text(), _workers(hops), *_last_plan(hops.plans)]


def _members(hops: HopStatus) -> RenderableType:
    table = ruled_table(
        "members\nthat hop",
        ">\nepoch",
        "\npass",
        ">partitions\nvisited",
        "\nworker",
        ">visits\ndone",
        ">\nrepeated",
        gap=1,
        fold="members\nthat hop",
    )
    for member in hops.members:
        table.add_row(
            Text(printable(member.member)),
            str(member.epoch),
            PASSES[member.evaluating],
            f"{member.visited}/{member.partitions}",
            Text(printable(member.worker or NONE)),
            f"{member.visits:,}",
            f"{member.repeated:,}",
        )
    return table


def _workers(hops: HopStatus) -> RenderableType:
    table = ruled_table(
        "workers\nof hops",
        ">\nbusy",
        ">\nwaiting",
        ">mean hop\nof nodes",
        ">visits\ndone",
        ">\nrepeated",
        gap=1,
        fold="workers\nof hops",
    )
    for worker in hops.workers[:MOST_WORKERS]:
        table.add_row(
            Text(printable(worker.worker)),
            format_percent(worker.busy),
            format_percent(worker.waiting),
            format_seconds(worker.hop_s),
            f"{worker.visits:,}",
            f"{worker.repeated:,}",
        )
    if len(hops.workers) > MOST_WORKERS:
        table.add_row(f"and {len(hops.workers) - MOST_WORKERS:,} more", *[""] * 5)
    return table


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
