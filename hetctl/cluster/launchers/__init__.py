"""Command lines that start the agents of resource sets, one file per launcher; pure functions."""

from __future__ import annotations

from hetctl.cluster.launchers.child_process import LOCAL
from hetctl.cluster.launchers.flux import FLUX
from hetctl.cluster.launchers.jsrun import JSRUN
from hetctl.cluster.launchers.launch_spec import Launcher, LaunchSpec, ResourceSet
from hetctl.cluster.launchers.mpiexec import MPIEXEC
from hetctl.cluster.launchers.mpirun import MPIRUN
from hetctl.cluster.launchers.srun import SRUN

LAUNCHERS: dict[str, Launcher] = {
    launcher.name: launcher for launcher in (LOCAL, SRUN, MPIRUN, MPIEXEC, FLUX, JSRUN)
}

__all__ = ["LAUNCHERS", "Launcher", "LaunchSpec", "ResourceSet"]
