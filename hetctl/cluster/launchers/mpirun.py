"""Launcher for Open MPI, as under PBS, or LSF without jsrun: an ``mpirun`` with an agent per resource set."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.cluster.launchers.child_process import variables_of
from hetctl.cluster.launchers.launch_spec import Launcher, LaunchSpec, ResourceSet, common_environment
from hetctl.model.site import Site

BINDING = ("--oversubscribe", "--bind-to", "none", "--allow-run-as-root")
"""The agents bind their ranks themselves; ``--allow-run-as-root`` is for containers."""


def reaching(site: Site) -> dict[str, str]:
    """Return the setting by which an Open MPI that does not know the batch system reaches other nodes."""
    shell = BATCH_SYSTEMS[site.batch_system].remote_shell
    return {"OMPI_MCA_plm_rsh_agent": shell} if shell else {}


def start_agents(site: Site, name: str, sets: Sequence[ResourceSet], command: tuple[str, ...]) -> LaunchSpec:
    """Start an agent for each set with ``mpirun``, which confines it only by the variable of visible GPUs.

    Each set is a separate program, started by ``env``, which also sets variables that ``mpirun`` would not
    pass on. ``--enable-recovery`` keeps the other agents running when one is lost.
    Sources: Open MPI's mpirun(1); IBM's "Run parallel jobs with blaunch"; "Launching
    with PBS / Torque" of Open MPI.
    """
    first, *others = (_program(site, held, command) for held in sets)
    argv = (
        "mpirun",
        *BINDING,
        "--enable-recovery",
        *first,
        *(word for program in others for word in (":", *program)),
    )
    return LaunchSpec(name, argv, {**common_environment(site), **reaching(site)})


def start_leaders(site: Site, name: str, nodes: Sequence[str], command: tuple[str, ...]) -> LaunchSpec:
    """Start leaders with ``mpirun``, independently of the ranks."""
    variables = [f"{name}={value}" for name, value in common_environment(site).items()]
    programs = [("-np", "1", "--host", f"{node}:1", "env", *variables, *command) for node in nodes]
    others = (word for program in programs[1:] for word in (":", *program))
    return LaunchSpec(
        name, ("mpirun", *BINDING, *programs[0], *others), {**common_environment(site), **reaching(site)}
    )


def _program(site: Site, held: ResourceSet, command: tuple[str, ...]) -> tuple[str, ...]:
    variables = {**common_environment(site), **variables_of(site, held)}
    words = (f"{name}={value}" for name, value in variables.items())
    return ("-np", "1", "--host", f"{held.node}:1", "env", *words, *command)


MPIRUN = Launcher("mpirun", start_agents, start_leaders)
