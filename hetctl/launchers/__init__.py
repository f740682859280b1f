"""From resource sets to the command line that starts their agents, one file per launcher: pure."""

from __future__ import annotations

from hetctl.launchers.jsrun import jsrun
from hetctl.launchers.local import local
from hetctl.launchers.mpirun import mpirun
from hetctl.launchers.nodes import node_of_agent, nodes_command, parse_gpus, parse_nodes
from hetctl.launchers.srun import srun
from hetctl.launchers.step import Launcher, ResourceSet, Step

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
    "Step",
    "node_of_agent",
    "nodes_command",
    "parse_gpus",
    "parse_nodes",
]
