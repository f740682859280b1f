"""Task of a rank in a job that tests a site: connect to all others, and report its GPU and cores."""

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
    """Empty collective backend for ranks that only connect."""

    needs = "nothing"

    def load(self) -> None:
        """Do nothing: there is nothing to import."""

    def meet(self, group: WiredGroup) -> None:
        """Do nothing: there is nothing to initialize."""

    def part(self) -> None:
        """Do nothing: there is nothing to shut down."""


def report_node(assignment: Assignment, context: WorkerContext) -> None:
    """Connect to the other ranks, and write the report of this one to the folder of the job."""
    folder = Path(assignment.task.folder)
    site = read_order(folder).site
    context.group = join_group(assignment.place, NoCollectives(), context.announce, timeouts=site.timeouts)
    binding = context.binding
    visible = os.environ.get(site.visible_devices) if site.device == "gpu" else None
    report = RankReport(binding.node, binding.gpu, visible, tuple(sorted(os.sched_getaffinity(0))))
    write_json(folder / f"rank-{assignment.place.rank:04d}.json", encode(report))
    context.group.leave()
