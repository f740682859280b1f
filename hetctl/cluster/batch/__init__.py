"""Batch systems: submit, ask, cancel. The only package that runs their commands."""

from __future__ import annotations

import importlib
from pathlib import Path

from hetctl.cluster.batch.base import BatchSystem
from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.model.site import Site


def batch_system_of(site: Site, folder: Path) -> BatchSystem:
    """Return the batch system of a site; `folder` is where it may keep files of its own."""
    module, _, name = BATCH_SYSTEMS[site.batch_system].client.partition(":")
    client: BatchSystem = getattr(importlib.import_module(module), name)(folder)
    return client
