"""Assignment of a GPU and cores to each rank on a node, and variables for all ranks."""

from __future__ import annotations

import os

from hetctl.cluster.launchers.nodes import NODE_VARIABLES
from hetctl.model.values import dataclass
from hetctl.runtime.agent.gpus import parse_cpu_list
from hetctl.runtime.agent.messages import AgentAssignment, AgentFacts

GPU = "gpu"
MIG = "MIG-"
"""Beginning of the UUIDs of MIG devices."""
VISIBLE_DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"})
"""Variables that limit the GPUs of a process; an empty one hides them all."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that numerical libraries read when loaded."""

MPI_VARIABLES = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_SIZE")
"""Prefixes of variables by which MPI would take each rank for the agent."""


def set_variables(threads: int) -> None:
    """Set the variables that an agent's ranks inherit; keep the user's values.

    Parameters
    ----------
    threads : int
        Threads of the numerical libraries in each rank.
    """
    of_mpi = {name for name in os.environ if name.startswith(MPI_VARIABLES)}
    for name in of_mpi.difference(NODE_VARIABLES):
        del os.environ[name]
    # By default CUDA puts the fastest GPU first, unlike the order of the node.
    for name, value in (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), *((v, str(threads)) for v in THREAD_VARIABLES)):
        os.environ.setdefault(name, value)


def hide_gpus() -> None:
    """Hide all GPUs from this process; call it before the first use of a GPU."""
    os.environ.update(dict.fromkeys(VISIBLE_DEVICES, ""))


@dataclass(frozen=True)
class Binding:
    """The part of a node that one rank uses.

    Parameters
    ----------
    node : str
        Name of the node in the batch system.
    gpu : int
        Number of the rank on the node: of its GPU or slot, or in a later seat there a larger one.
    device : int or None
        Index of the GPU among those that the agent's processes see; None for a slot.
    cores : tuple of int
        Numbers of the cores, as in `os.sched_getaffinity`.
    memory_bytes : int
        Rank's share of the node's memory; 0 if unknown.
    pythons : int
        Descriptor by which the rank reaches the node's warm Pythons.
    mig_device : str
        UUID of the MIG device that alone the rank sees, as a process of CUDA uses one; empty for others.
    """

    node: str
    gpu: int
    device: int | None
    cores: tuple[int, ...]
    memory_bytes: int = 0
    pythons: int = -1
    mig_device: str = ""


def binding_of(assignment: AgentAssignment, gpu: int, facts: AgentFacts) -> Binding:
    """Return the GPU and the cores of a rank by its number: cores near the GPU if they are known.

    A management library knows them, or the site file. Ranks that share a GPU share its cores, too. Else the
    cores follow from the GPU's number, or, if the agent has no more cores than its GPUs need, they are
    divided in order. With fewer cores than in the site file, ranks share them.
    """
    rank, gpu = gpu, gpu if gpu in assignment.gpus else gpu % assignment.gpus_of_node
    index = assignment.gpus.index(gpu)
    device = index if assignment.device == GPU else None
    mig_device = _mig_device(index, facts) if device is not None else ""
    confined = len(facts.cores) <= len(assignment.gpus) * assignment.cores_per_gpu
    # In a member's own step the agent sees only the member's cores, which numbers of GPUs on the node do not
    # index.
    cores, place = facts.cores, index if confined else gpu
    # What a management library says goes before the site file.
    known = [one.cores for one in facts.gpus] or [parse_cpu_list(text) for text in assignment.gpu_cores]
    position = device if facts.gpus else gpu
    if device is not None and position is not None and position < len(known):
        near = known[position]
        # A job that shares its node may have no cores near a GPU: then it takes any of its own.
        if usable := tuple(core for core in near if core in facts.cores):
            # GPUs of one NUMA node list the same cores: each takes the share after those of the GPUs before.
            cores, place = usable, sum(other == near for other in known[:position])
    first = place * assignment.cores_per_gpu
    own = {cores[core % len(cores)] for core in range(first, first + assignment.cores_per_gpu)}
    return Binding(
        *(assignment.node, rank, 0 if mig_device else device, tuple(sorted(own)), assignment.memory_per_gpu),
        mig_device=mig_device,
    )


def _mig_device(index: int, facts: AgentFacts) -> str:
    """Return the UUID of the MIG device of this index; empty if it is none.

    Without a management library they are known where the batch system names them, as Slurm does.
    """
    named = facts.devices.get("CUDA_VISIBLE_DEVICES", "").split(",")
    uuids = [gpu.uuid for gpu in facts.gpus] or [entry.strip() for entry in named]
    uuid = uuids[index] if index < len(uuids) else ""
    return uuid if uuid.startswith(MIG) else ""
