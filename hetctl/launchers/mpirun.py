"""Open MPI alone, as under an LSF without jsrun: one ``mpirun`` with an agent on each node."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.core.site import Node, Site
from hetctl.launchers.local import variables_of
from hetctl.launchers.step import AGENTS, Step, common_environment

BINDING = ("--oversubscribe", "--bind-to", "none", "--allow-run-as-root")
"""The agents bind their ranks themselves; ``--allow-run-as-root`` is for containers."""

BLAUNCH = {"OMPI_MCA_plm_rsh_agent": "blaunch"}
"""How an Open MPI that was not built with LSF reaches other nodes: ``blaunch`` must be used as ssh is."""


def mpirun(site: Site, nodes: Sequence[Node], command: tuple[str, ...]) -> Step:
    """Start an agent on each node with ``mpirun``.

    A program per node, each through ``env``, which also takes the variables along where ``mpirun`` would
    not. ``--enable-recovery`` lets the other agents go on when one is lost.
    Sources: Open MPI's mpirun(1); IBM's "Run parallel jobs with blaunch".
    """
    first, *others = (_program(site, node, command) for node in nodes)
    argv = (
        "mpirun",
        *BINDING,
        "--enable-recovery",
        *first,
        *(word for program in others for word in (":", *program)),
    )
    return Step(AGENTS, argv, {**common_environment(site), **BLAUNCH})


def _program(site: Site, node: Node, command: tuple[str, ...]) -> tuple[str, ...]:
    variables = {**common_environment(site), **variables_of(site, node)}
    words = (f"{name}={value}" for name, value in variables.items())
    return ("-np", "1", "--host", f"{node.name}:1", "env", *words, *command)
