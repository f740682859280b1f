"""The task of a rank in a job that tries a site: meet all others, and report its GPU and cores."""

from __future__ import annotations

import os
from pathlib import Path

from hetctl.model.serialization import encode
from hetctl.runtime.driver.probe import RankReport, read_order
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import WiredGroup, join_group
from hetctl.runtime.worker.messages import Assignment
from hetctl.storage.atomic_io import write_json


class NoCollectives:
    """A link for ranks that only meet."""

    needs = "nothing"

    def load(self) -> None:
        """There is nothing to import."""

    def meet(self, group: WiredGroup) -> None:
        """There is nothing to start."""

    def part(self) -> None:
        """There is nothing to end."""


def report_node(assignment: Assignment, context: WorkerContext) -> None:
    """Meet the other ranks, and write the report of this one to the folder of the job."""
    folder = Path(assignment.task.folder)
    site = read_order(folder).site
    context.group = join_group(assignment.place, NoCollectives(), context.announce, timeouts=site.timeouts)
    binding = context.binding
    visible = os.environ.get(site.visible_devices) if site.device == "gpu" else None
    report = RankReport(binding.node, binding.gpu, visible, tuple(sorted(os.sched_getaffinity(0))))
    write_json(folder / f"rank-{assignment.place.rank:04d}.json", encode(report))
    context.group.leave()
