"""From an allocation to the command line of its step: one file per launcher, pure functions."""

from __future__ import annotations

from hetctl.launchers.jsrun import jsrun, jsrun_erf
from hetctl.launchers.local import local
from hetctl.launchers.mpirun import mpirun
from hetctl.launchers.nodes import nodes_command, parse_gpus, parse_nodes
from hetctl.launchers.srun import srun
from hetctl.launchers.step import Launcher, Step

LAUNCHERS: dict[str, Launcher] = {
    "local": local,
    "srun": srun,
    "mpirun": mpirun,
    "jsrun": jsrun,
    "jsrun-erf": jsrun_erf,
}

__all__ = ["LAUNCHERS", "Launcher", "Step", "nodes_command", "parse_gpus", "parse_nodes"]
