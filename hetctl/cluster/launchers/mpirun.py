"""Open MPI alone, as under an LSF without jsrun: an ``mpirun`` with an agent for each resource set."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.cluster.launchers.child_process import variables_of
from hetctl.cluster.launchers.launch_spec import LaunchSpec, ResourceSet, common_environment
from hetctl.model.site import Site

BINDING = ("--oversubscribe", "--bind-to", "none", "--allow-run-as-root")
"""The agents bind their ranks themselves; ``--allow-run-as-root`` is for containers."""

BLAUNCH = {"OMPI_MCA_plm_rsh_agent": "blaunch"}
"""How an Open MPI that was not built with LSF reaches other nodes: ``blaunch`` must be used as ssh is."""


def mpirun(site: Site, name: str, sets: Sequence[ResourceSet], command: tuple[str, ...]) -> LaunchSpec:
    """Start an agent for each set with ``mpirun``, which confines it by the variable of visible GPUs alone.

    A program per set, each through ``env``, which also takes the variables along where ``mpirun`` would
    not. ``--enable-recovery`` lets the other agents go on when one is lost.
    Sources: Open MPI's mpirun(1); IBM's "Run parallel jobs with blaunch".
    """
    first, *others = (_program(site, held, command) for held in sets)
    argv = (
        "mpirun",
        *BINDING,
        "--enable-recovery",
        *first,
        *(word for program in others for word in (":", *program)),
    )
    return LaunchSpec(name, argv, {**common_environment(site), **BLAUNCH})


def _program(site: Site, held: ResourceSet, command: tuple[str, ...]) -> tuple[str, ...]:
    variables = {**common_environment(site), **variables_of(site, held)}
    words = (f"{name}={value}" for name, value in variables.items())
    return ("-np", "1", "--host", f"{held.node}:1", "env", *words, *command)
