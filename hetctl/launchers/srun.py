"""Slurm: one job step with an agent on each node."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.core.site import Node, Site
from hetctl.launchers.step import AGENTS, Step, common_environment


def srun(site: Site, nodes: Sequence[Node], command: tuple[str, ...]) -> Step:
    """Start an agent on each node with ``srun``; it holds the node's GPUs, cores and memory.

    One step, since on Slingshot each has a network identifier (VNI) of its own, and since a step's control
    group hides the other GPUs of a node from NCCL. ``--gpu-bind=none``: each process sees all of them.
    ``--no-kill``, ``--kill-on-bad-exit=0`` and ``--wait=0`` let the other agents go on when a node or an
    agent is lost. ``--mem=0`` is all the memory that the job has on the node.
    Source: srun(1).
    """
    argv = (
        *("srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"),
        *(f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
        *(f"--nodelist={','.join(node.name for node in nodes)}", f"--cpus-per-task={site.cores_per_node}"),
        *((f"--gpus-per-node={site.gpus_per_node}", "--gpu-bind=none") if site.device == "gpu" else ()),
        *("--mem=0", "--unbuffered"),
        *((f"--mpi={site.mpi}",) if site.mpi else ()),
        *command,
    )
    return Step(AGENTS, argv, common_environment(site))
