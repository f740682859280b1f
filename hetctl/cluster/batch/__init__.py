"""Clients of batch systems: submit, query, cancel. The only package that runs their commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hetctl.cluster.batch.base import BatchSystem
from hetctl.cluster.batch.command import CommandRunner
from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.model.interpreter import load_entry
from hetctl.model.site import Site


def batch_system_of(site: Site, folder: Path) -> BatchSystem:
    """Return the client of a site's batch system; it may keep its own files in `folder`."""
    make_client: Callable[[Path, CommandRunner], BatchSystem] = load_entry(
        BATCH_SYSTEMS[site.batch_system].client
    )
    return make_client(folder, CommandRunner(site.timeouts.command_s))
