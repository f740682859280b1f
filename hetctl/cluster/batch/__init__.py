"""Batch systems: submit, ask, cancel. The only package that runs their commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hetctl.cluster.batch.base import BatchSystem
from hetctl.cluster.batch.local import LocalBatch
from hetctl.cluster.batch.lsf import LsfBatch
from hetctl.cluster.batch.slurm import SlurmBatch
from hetctl.model.site import Site

BATCH_SYSTEMS: dict[str, Callable[[Path], BatchSystem]] = {
    "local": LocalBatch,
    "slurm": SlurmBatch,
    "lsf": LsfBatch,
}


def batch_system_of(site: Site, folder: Path) -> BatchSystem:
    """Return the batch system of a site; `folder` is where it may keep files of its own."""
    return BATCH_SYSTEMS[site.batch_system](folder)
