"""Where it is trained: sites with their queues, and the nodes of one allocation."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hetctl.model.interconnect import NodeLinks

NODES, MEMBERS = "nodes", "members"
"""Resource sets of agents: whole nodes for the whole job, or each member's GPUs on a node for a round."""


@dataclass(frozen=True)
class Queue:
    """Limits of one queue (a partition in Slurm's words); None means no limit is known."""

    name: str
    max_nodes: int | None = None
    max_wall_s: int | None = None


@dataclass(frozen=True)
class NodeType:
    """Nodes of a site that have the same type of GPU.

    Parameters
    ----------
    gpu_type : str
        As profiles name it.
    hosts : tuple of str
        Patterns of the nodes' names, with * for any text.
    gpu_memory : int or None
        Bytes of each GPU; None: not known.
    """

    gpu_type: str
    nodes: int
    hosts: tuple[str, ...]
    gpu_memory: int | None = None


@dataclass(frozen=True)
class NetworkInterfaces:
    """Interfaces of a site's nodes by their names or patterns such as ``hsn*``, the best first.

    Parameters
    ----------
    control : tuple of str
        For connections between driver and compute nodes and for the meeting of a group's ranks; empty: the
        one of the host name.
    gloo : tuple of str
        For Gloo; empty: the one by which a rank reaches the others.
    """

    control: tuple[str, ...] = ()
    gloo: tuple[str, ...] = ()


ANY_INTERFACES = NetworkInterfaces()

SIGN_EVERY_S = 2.0
"""Between two signs of life of an agent, and of a rank at work."""


@dataclass(frozen=True)
class Timeouts:
    """Times after which what has not come by then is given up, in seconds.

    Parameters
    ----------
    hang_s : float
        A group of which no rank has given a sign of life for so long hangs, and so does what its ranks do
        together if it takes longer.
    meeting_s : float
        For the ranks of a group to meet; a framework may have to start first.
    join_s : float
        For the agent of a node to connect to the driver after its launch.
    silence_s : float
        An agent that has sent nothing for so long is lost with its node.
    ending_s : float
        For the ranks of a group that has failed to end by themselves; then they are killed.
    orphaned_s : float
        For the script of a job to see that its driver is gone; then the agents end the job.
    samples_s : float
        For preprocessors to prepare a batch; leaders of nodes that get no further are given up after half
        of it, so that trainers have the rest to go on without them.
    lockstep_s : float
        For members that share in lockstep to come to the ring, and for their leaders to begin.
    leaders_s : float
        For the leaders of nodes to load the data and connect.
    """

    hang_s: float = 900.0
    meeting_s: float = 300.0
    join_s: float = 300.0
    silence_s: float = 30.0
    ending_s: float = 3.0
    orphaned_s: float = 120.0
    samples_s: float = 600.0
    lockstep_s: float = 60.0
    leaders_s: float = 300.0


USUAL_TIMEOUTS = Timeouts()


@dataclass(frozen=True)
class SiteKey:
    """A key of a site as it counts, and where it stands: no file for a default."""

    key: str
    value: Any
    file: str | None = None
    line: int | None = None


OF_COMMUNICATION = ("NCCL_", "RCCL_", "GLOO_", "HOROVOD_GLOO_", "FI_")
"""Prefixes of variables of NCCL, RCCL, Gloo and libfabric, of which a site has defaults."""


def yields(variable: str) -> bool:
    """Return true if a site's value of a variable is a default, which what the user has set goes over."""
    return variable.startswith(OF_COMMUNICATION)


@dataclass(frozen=True)
class Site:
    """A machine as its site file describes it.

    Parameters
    ----------
    device : str
        ``gpu``, or ``slot`` at a site without GPUs, where a slot stands for a GPU everywhere.
    launch : str
        `NODES` or `MEMBERS`.
    memory_per_node : int
        Bytes.
    submit_by : str
        ``file`` if the submit command takes the script's path, ``stdin`` if it reads the script.
    setup : tuple of str
        Shell lines that prepare the environment at the top of every script.
    directives : tuple of str
        Extra lines for the batch system, without their ``#SBATCH`` or ``#BSUB``.
    environment : mapping
        Variables that every step gets; those of `OF_COMMUNICATION` only where the user has not set them.
    mpi : str or None
        The launcher's MPI plugin (``srun --mpi=...``).
    node_types : tuple of NodeType
        Of a site with several types of GPU; jobs are planned as if they got nodes in this order.
    queue_option : str
        How Slurm is told the queue: ``partition`` or ``qos``.
    visible_devices : str
        The variable that names the GPUs which a process sees.
    gpu_memory : int or None
        Bytes of each GPU where `node_types` does not say it; None: not known.
    links : NodeLinks or None
        Between GPUs, for pipelines; None: not known.
    network : NetworkInterfaces
        Of its nodes.
    timeouts : Timeouts
        Of its jobs.
    """

    name: str
    batch_system: str
    launcher: str
    nodes: int
    gpus_per_node: int
    cores_per_node: int
    memory_per_node: int
    queues: tuple[Queue, ...]
    device: str = "gpu"
    launch: str = NODES
    gpu_type: str | None = None
    account: str | None = None
    queue: str | None = None
    submit_by: str = "file"
    template: str | None = None
    setup: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    mpi: str | None = None
    python: str | None = None
    max_queued_jobs: int | None = None
    host_patterns: tuple[str, ...] = ()
    node_types: tuple[NodeType, ...] = ()
    queue_option: str = "partition"
    visible_devices: str = "CUDA_VISIBLE_DEVICES"
    gpu_memory: int | None = None
    links: NodeLinks | None = None
    network: NetworkInterfaces = ANY_INTERFACES
    timeouts: Timeouts = USUAL_TIMEOUTS

    def memory_of(self, gpu_type: str | None) -> int | None:
        """Return the bytes of a GPU of a type, None if they are not known."""
        own = {kind.gpu_type: kind.gpu_memory for kind in self.node_types}.get(gpu_type or "")
        return self.gpu_memory if own is None else own

    def type_of(self, node: str) -> str | None:
        """Return the type of a node's GPUs, if the site has several."""
        for node_type in self.node_types:
            if any(fnmatch.fnmatch(node, pattern) for pattern in node_type.hosts):
                return node_type.gpu_type
        return None

    def yielding_to(self, environment: Mapping[str, str]) -> Site:
        """Return the site with the variables of communication libraries as its user has set them."""
        set_by_user = {n: environment[n] for n in self.environment if yields(n) and n in environment}
        return replace(self, environment={**self.environment, **set_by_user})

    @property
    def gpus(self) -> int:
        """GPUs of the whole site."""
        return self.nodes * self.gpus_per_node

    @property
    def cores_per_gpu(self) -> int:
        """Cores that go with each GPU, at least one."""
        return max(1, self.cores_per_node // self.gpus_per_node)

    @property
    def memory_per_gpu(self) -> int:
        """Bytes of a node's memory that go with each GPU."""
        return self.memory_per_node // self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Node:
    """A node of an allocation, with the GPUs that are ours on it; all of them are of one type."""

    name: str
    gpus: tuple[int, ...]
    gpu_type: str | None = None


@dataclass(frozen=True)
class Cluster:
    """The nodes that a plan may use."""

    nodes: tuple[Node, ...]

    @classmethod
    def of(cls, gpus: int, gpus_per_node: int) -> Cluster:
        """Describe `gpus` GPUs on as few unnamed nodes as possible (``node-0``, ``node-1``, ..)."""
        nodes = []
        for index in range(-(-gpus // gpus_per_node)):
            here = min(gpus_per_node, gpus - index * gpus_per_node)
            nodes.append(Node(f"node-{index}", tuple(range(here))))
        return cls(tuple(nodes))

    @classmethod
    def at(cls, site: Site, gpus: int) -> Cluster:
        """Describe `gpus` GPUs of a site, of the types that come first there."""
        parts: dict[str, tuple[int, int]] = {}
        left = gpus
        for node_type in site.node_types:
            here = min(left, node_type.nodes * site.gpus_per_node)
            if here:
                parts[node_type.gpu_type] = here, site.gpus_per_node
            left -= here
        return cls.of_types(parts) if parts else cls.of(gpus, site.gpus_per_node)

    @classmethod
    def of_types(cls, gpus: Mapping[str, tuple[int, int]]) -> Cluster:
        """Describe GPUs of several types, (how many, at most so many per node) by type; "" is unknown."""
        nodes: list[Node] = []
        for gpu_type, (count, gpus_per_node) in gpus.items():
            nodes += [
                Node(f"node-{index}", node.gpus, gpu_type or None)
                for index, node in enumerate(cls.of(count, gpus_per_node).nodes, start=len(nodes))
            ]
        return cls(tuple(nodes))

    @property
    def gpus(self) -> int:
        """GPUs on all nodes."""
        return sum(len(node.gpus) for node in self.nodes)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of the largest node."""
        return max(len(node.gpus) for node in self.nodes)
