"""Slurm: a job step with an agent for each resource set."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.cluster.launchers.launch_spec import LaunchSpec, ResourceSet, common_environment, share_of
from hetctl.model.site import MEMBERS, NODES, Site

BY_LAUNCH = {
    NODES: ("--no-kill", "--kill-on-bad-exit=0", "--wait=0"),
    MEMBERS: ("--exact", "--kill-on-bad-exit=1"),
}
"""A step of all nodes goes on when a node or an agent is lost; a member's ends, and frees its GPUs."""


def srun(site: Site, name: str, sets: Sequence[ResourceSet], command: tuple[str, ...]) -> LaunchSpec:
    """Start an agent for each set with ``srun``; it holds the set's GPUs, cores and memory.

    One step, since on Slingshot each has a network identifier (VNI) of its own, and since a step's control
    group hides the other GPUs of a node from NCCL. ``--gpu-bind=none``: each process sees all of the step's.
    ``--mem=0`` is all the memory that the job has on the node. A member's step takes no more than it asks
    for (``--exact``) and says how much memory that is, or else no other step would run beside it. Which of
    a node's GPUs it gets is for Slurm to choose.
    Source: srun(1).
    """
    share = share_of(site, sets)
    argv = (
        *("srun", f"--job-name={name}", *BY_LAUNCH[site.launch]),
        *(f"--nodes={len(sets)}", f"--ntasks={len(sets)}", "--ntasks-per-node=1"),
        *(f"--nodelist={','.join(each.node for each in sets)}", f"--cpus-per-task={share.cores}"),
        *((f"--gpus-per-node={share.gpus}", "--gpu-bind=none") if site.device == "gpu" else ()),
        *(f"--mem={share.memory_mib}", "--unbuffered"),
        *((f"--mpi={site.mpi}",) if site.mpi else ()),
        *command,
    )
    return LaunchSpec(name, argv, common_environment(site))
