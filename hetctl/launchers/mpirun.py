"""Open MPI alone, as under an LSF without jsrun: one ``mpirun`` per member, GPUs by their numbers."""

from __future__ import annotations

from hetctl.core.plan import Allocation, Placement
from hetctl.core.site import Site
from hetctl.launchers.local import devices
from hetctl.launchers.step import Step, common_environment

BINDING = ("--oversubscribe", "--bind-to", "none", "--allow-run-as-root")
"""As on one machine: the ranks bind themselves to their share."""

BLAUNCH = {"OMPI_MCA_plm_rsh_agent": "blaunch"}
"""How an Open MPI that was not built with LSF reaches other nodes: ``blaunch`` must be used as ssh is."""


def mpirun(site: Site, allocation: Allocation, command: tuple[str, ...]) -> Step:
    """Start one rank per GPU or slot with ``mpirun``, on the nodes of its placement.

    Nothing but ``CUDA_VISIBLE_DEVICES`` keeps members apart, and it differs from node to node, so
    ``mpirun`` starts one program per node, each through ``env``; this also takes the variables along where
    ``mpirun`` would not. An Open MPI that was not built with LSF reaches other nodes through ``blaunch``,
    which must be used as ssh is. A single rank is started alike: its node may not be the script's.
    Sources: Open MPI's mpirun(1); IBM's "Run parallel jobs with blaunch".
    """
    first, *others = (_program(site, placement, command) for placement in allocation.placement)
    argv = ("mpirun", *BINDING, *first, *(word for program in others for word in (":", *program)))
    return Step(allocation.member, argv, {**common_environment(site), **BLAUNCH})


def _program(site: Site, placement: Placement, command: tuple[str, ...]) -> tuple[str, ...]:
    ranks = len(placement.gpus)
    variables = {**common_environment(site), **devices(site, placement.gpus)}
    return (
        *("-np", str(ranks), "--host", f"{placement.node}:{ranks}"),
        *("env", *(f"{name}={value}" for name, value in variables.items())),
        *command,
    )
