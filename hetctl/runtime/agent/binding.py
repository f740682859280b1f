"""The GPU and the cores of each rank on a node."""

from __future__ import annotations

from dataclasses import dataclass

from hetctl.runtime.agent.messages import AgentFacts, Welcome

GPU = "gpu"
VISIBLE_DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"})
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Read by numerical libraries when they are loaded."""


@dataclass(frozen=True)
class Binding:
    """The share of a node that one rank uses.

    Parameters
    ----------
    node : str
        As the batch system calls it.
    gpu : int
        Number of the GPU or slot on the node.
    device : int or None
        Index of the GPU among those that the processes of its agent see; None for a slot.
    cores : tuple of int
        Numbers of the cores, as of `os.sched_getaffinity`.
    """

    node: str
    gpu: int
    device: int | None
    cores: tuple[int, ...]


def binding_of(welcome: Welcome, gpu: int, facts: AgentFacts) -> Binding:
    """Bind a rank to its GPU, and to its share of the cores near that, or else to the cores of that number.

    Where the agent may use no more cores than go with its GPUs, they are shared out in order. Where there
    are fewer cores than the site says, ranks share them.
    """
    index = welcome.gpus.index(gpu)
    device = index if welcome.device == GPU else None
    confined = len(facts.cores) <= len(welcome.gpus) * welcome.cores_per_gpu
    cores, place = facts.cores, index if confined else gpu
    if device is not None and device < len(facts.gpus):
        near = facts.gpus[device].cores
        if usable := tuple(core for core in near if core in facts.cores):
            cores, place = usable, sum(other.cores == near for other in facts.gpus[:device])
    first = place * welcome.cores_per_gpu
    own = {cores[core % len(cores)] for core in range(first, first + welcome.cores_per_gpu)}
    return Binding(welcome.node, gpu, device, tuple(sorted(own)))
