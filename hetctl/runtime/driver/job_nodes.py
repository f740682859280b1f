"""Nodes of the batch job."""

from __future__ import annotations

import os
import subprocess

from hetctl.cluster.launchers.nodes import nodes_command, parse_gpus, parse_nodes
from hetctl.model.errors import BatchSystemError
from hetctl.model.site import Node, Site


def nodes_of_this_job(site: Site, gpus: int | None = None) -> tuple[Node, ...]:
    """Return the nodes of this job from the batch system, each with all its GPUs, except in local jobs.

    `gpus` limits the GPUs in use: the last node then has fewer.

    Raises
    ------
    BatchSystemError
        If this process is not inside a job of the site's batch system.
    """
    command = nodes_command(site)
    try:
        output = _run(command) if command else ""
    except (OSError, subprocess.SubprocessError) as error:
        raise BatchSystemError(f"cannot list the nodes of this job on site {site.name}: {error}") from None
    names = parse_nodes(site, os.environ, output)
    on_node = parse_gpus(site, os.environ)
    left = [max(0, (gpus or site.gpus) - len(on_node) * index) for index in range(len(names))]
    return tuple(
        Node(name, on_node[:n], site.type_of(name)) for name, n in zip(names, left, strict=True) if n > 0
    )


def _run(command: tuple[str, ...]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
