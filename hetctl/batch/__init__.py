"""Batch systems: submit, ask, cancel. The only package that runs their commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hetctl.batch.base import BatchSystem
from hetctl.batch.local import LocalBatch
from hetctl.batch.slurm import SlurmBatch
from hetctl.core.errors import BatchSystemError
from hetctl.core.site import Site

BATCH_SYSTEMS: dict[str, Callable[[Path], BatchSystem]] = {
    "local": LocalBatch,
    "slurm": SlurmBatch,
}


def batch_system_of(site: Site, folder: Path) -> BatchSystem:
    """Return the batch system of a site; `folder` is where it may keep files of its own.

    Raises
    ------
    BatchSystemError
        If jobs of this batch system can only be rendered.
    """
    try:
        return BATCH_SYSTEMS[site.batch_system](folder)
    except KeyError:
        raise BatchSystemError(
            f"site {site.name}: {site.batch_system} jobs can be rendered, but not submitted",
            f"use `hetctl render --site {site.name}`; jobs can be submitted to: {', '.join(BATCH_SYSTEMS)}",
        ) from None
