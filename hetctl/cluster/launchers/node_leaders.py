"""Leaders of nodes: one process on each node beside the ranks, for rounds in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetctl.cluster.launchers.launch_spec import LaunchSpec, common_environment
from hetctl.cluster.launchers.mpirun import BINDING, BLAUNCH
from hetctl.model.site import Site


def srun_leaders(site: Site, name: str, nodes: Sequence[str], command: tuple[str, ...]) -> LaunchSpec:
    """Start leaders with ``srun`` on cores and memory that are also the agents', and without GPUs.

    ``--overlap`` lets this step begin although the agents' step holds the whole job.
    Sources: Slurm's srun(1), ``--overlap`` and ``--gres=none``.
    """
    argv = (
        *("srun", "--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
        *(f"--cpus-per-task={site.cores_per_node}", "--gres=none", f"--nodelist={','.join(nodes)}"),
        *("--kill-on-bad-exit=1", "--unbuffered", *((f"--mpi={site.mpi}",) if site.mpi else ())),
        *command,
    )
    return LaunchSpec(name, argv, common_environment(site))


def mpirun_leaders(site: Site, name: str, nodes: Sequence[str], command: tuple[str, ...]) -> LaunchSpec:
    """Start leaders with ``mpirun``, independently of the ranks."""
    variables = [f"{name}={value}" for name, value in common_environment(site).items()]
    programs = [("-np", "1", "--host", f"{node}:1", "env", *variables, *command) for node in nodes]
    others = (word for program in programs[1:] for word in (":", *program))
    return LaunchSpec(
        name, ("mpirun", *BINDING, *programs[0], *others), {**common_environment(site), **BLAUNCH}
    )


LEADERS: dict[str, Callable[[Site, str, Sequence[str], tuple[str, ...]], LaunchSpec]] = {
    "srun": srun_leaders,
    "mpirun": mpirun_leaders,
}
"""Functions by launcher. With any other, each node prepares for itself: ``jsrun`` never shares cores."""
