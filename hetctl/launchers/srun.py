"""Slurm: one job step per member, on the nodes of its placement."""

from __future__ import annotations

from hetctl.core.plan import Allocation
from hetctl.core.site import Site
from hetctl.launchers.step import Step, common_environment

MEBIBYTE = 2**20


def srun(site: Site, allocation: Allocation, command: tuple[str, ...]) -> Step:
    """Start one rank per GPU with ``srun``.

    ``--exact`` and an explicit share of the memory let steps run side by side: a step without them takes
    all of the job's and the next one waits. Slurm chooses which of a node's GPUs a rank gets and never
    gives one to two steps, so ``--overlap`` must not appear. Each rank sees its own GPU only.
    """
    counts = [len(placement.gpus) for placement in allocation.placement]
    even = len(set(counts)) == 1
    argv = (
        "srun",
        "--exact",
        f"--nodes={len(counts)}",
        f"--ntasks={allocation.gpus}",
        f"--cpus-per-task={site.cores_per_gpu}",
        *(("--gpus-per-task=1",) if site.device == "gpu" else ()),
        *(_even_layout(site, allocation, counts[0]) if even else _uneven_layout(site)),
        "--kill-on-bad-exit=1",
        "--unbuffered",
        *((f"--mpi={site.mpi}",) if site.mpi and allocation.gpus > 1 else ()),
        *command,
    )
    hosts = None if even else _rank_nodes(allocation)
    return Step(allocation.member, argv, common_environment(site), hosts, "SLURM_HOSTFILE")


def _even_layout(site: Site, allocation: Allocation, gpus_on_node: int) -> tuple[str, ...]:
    memory = site.memory_per_node * gpus_on_node // (site.gpus_per_node * MEBIBYTE)
    return (
        f"--ntasks-per-node={gpus_on_node}",
        f"--mem={memory}M",
        f"--nodelist={','.join(placement.node for placement in allocation.placement)}",
    )


def _uneven_layout(site: Site) -> tuple[str, ...]:
    """Return the flags of a step whose nodes hold different numbers of ranks.

    ``--mem`` is the same on every node, so the node with the fewest ranks would lose memory that the
    members beside it need, and they would wait. Memory per core follows the ranks.
    """
    memory = site.memory_per_node // (site.gpus_per_node * site.cores_per_gpu * MEBIBYTE)
    return ("--distribution=arbitrary", f"--mem-per-cpu={memory}M")


def _rank_nodes(allocation: Allocation) -> tuple[str, ...]:
    return tuple(placement.node for placement in allocation.placement for _ in placement.gpus)
