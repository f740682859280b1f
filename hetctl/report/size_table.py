"""Terminal output of the size of jobs: the choice, and the alternatives."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from hetctl.model.job import JobSize, JobSizeOption
from hetctl.report.table_style import ruled_table
from hetctl.report.units import device_word, format_seconds


def size_line(size: JobSize, chosen: JobSizeOption | None, device: str) -> RenderableType:
    """Return a line on the resources of each job.

    Parameters
    ----------
    chosen : JobSizeOption or None
        Choice of the job planner; None if the user gave all values.
    """
    what = f"{size.nodes} node{'s' * (size.nodes != 1)} ({size.gpus} {device_word(device, size.gpus)})"
    line = f"each job: {what} for {format_seconds(size.wall_s)} in queue {size.queue.name}"
    if chosen is None:
        return Text(line)
    jobs = f"{chosen.jobs} job{'s' * (chosen.jobs != 1)}"
    return Text(f"{line}; {jobs} and {chosen.gpu_hours:.3g} {device_word(device)} hours expected")


def size_table(chosen: JobSizeOption, prospects: Sequence[JobSizeOption], device: str) -> RenderableType:
    """Return a table of the sizes considered; an arrow marks the choice."""
    table = ruled_table(
        "", "queue", ">nodes", ">time asked", ">jobs", ">makespan", f">{device_word(device)} hours", gap=1
    )
    for prospect in prospects:
        size = prospect.size
        table.add_row(
            "→" if prospect == chosen else "",
            size.queue.name,
            str(size.nodes),
            format_seconds(size.wall_s),
            str(prospect.jobs),
            format_seconds(prospect.makespan_s),
            f"{prospect.gpu_hours:.3g}",
        )
    return Group(Text("\nSizes of a job", "bold"), table)
