"""Command lines that start the agents of resource sets, one file per launcher; pure functions."""

from __future__ import annotations

from hetctl.cluster.launchers.child_process import local
from hetctl.cluster.launchers.jsrun import jsrun
from hetctl.cluster.launchers.launch_spec import Launcher, LaunchSpec, ResourceSet
from hetctl.cluster.launchers.mpirun import mpirun
from hetctl.cluster.launchers.nodes import node_of_agent, nodes_command, parse_gpus, parse_nodes
from hetctl.cluster.launchers.srun import srun

LAUNCHERS: dict[str, Launcher] = {
    "local": local,
    "srun": srun,
    "mpirun": mpirun,
    "jsrun": jsrun,
}

__all__ = [
    "LAUNCHERS",
    "Launcher",
    "ResourceSet",
    "LaunchSpec",
    "node_of_agent",
    "nodes_command",
    "parse_gpus",
    "parse_nodes",
]
