"""Sites with their queues and links, and the nodes of one allocation."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

NODES, MEMBERS = "nodes", "members"
"""Resource sets of agents: whole nodes for the whole job, or a member's GPUs on a node for a round."""


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
        Type name as in profiles.
    hosts : tuple of str
        Patterns of the names of the nodes, with * for any text.
    gpu_memory : int or None
        Memory of each GPU in bytes; None: unknown.
    """

    gpu_type: str
    nodes: int
    hosts: tuple[str, ...]
    gpu_memory: int | None = None


@dataclass(frozen=True)
class NetworkInterfaces:
    """Network interfaces of a site's nodes by name or pattern such as ``hsn*``, and what is encrypted there.

    Parameters
    ----------
    control : tuple of str
        Interfaces for connections between driver and compute nodes and for the rendezvous of a group's
        ranks, the preferred one first; empty: the interface of the host name.
    gloo : tuple of str
        Interfaces for Gloo; empty: the interface by which a rank reaches the others.
    encrypt_data : bool
        Encrypt tensors, samples and states on their way between nodes; all else is always encrypted.
    """

    control: tuple[str, ...] = ()
    gloo: tuple[str, ...] = ()
    encrypt_data: bool = True


ANY_INTERFACES = NetworkInterfaces()

Point = tuple[float, float]
"""Size of a message in bytes, and its transfer time in seconds."""


@dataclass(frozen=True)
class IntraNode:
    """Links within a node: peak bandwidth, with the share of it that is reached or measured points."""

    bytes_per_s: float
    scaling: float | None = None
    points: tuple[Point, ...] = ()


@dataclass(frozen=True)
class InterNode:
    """Links between nodes: latency and bandwidth, or measured points."""

    latency_s: float | None = None
    bytes_per_s: float | None = None
    points: tuple[Point, ...] = ()


@dataclass(frozen=True)
class NodeLinks:
    """Links of a cluster: the same for all pairs of GPUs in a node, and for all pairs of nodes."""

    intra_node: IntraNode
    inter_node: InterNode


HEARTBEAT_EVERY_S = 2.0
LEASE_SHARE = 0.8
"""Share of the time after which a silent process counts as dead, at which it ends itself.

All that it has begun has thus ended when others take its place.
"""
"""Interval in seconds between heartbeats of an agent, and of a rank at work."""


@dataclass(frozen=True)
class Timeouts:
    """Time limits in seconds.

    Parameters
    ----------
    hang_s : float
        Time without a heartbeat from any rank after which a group counts as hung; also the limit of each
        collective operation of its ranks.
    meeting_s : float
        Time for the ranks of a group to connect; it includes the start of a framework.
    join_s : float
        Time for the agent of a node to connect to the driver after its launch.
    silence_s : float
        Time without a message from an agent after which the agent and its node count as lost.
    ending_s : float
        Time for the ranks of a failed group to end by themselves before they are killed.
    orphaned_s : float
        Time for a job's script to see that its driver has ended; then the agents end the job.
    lease_s : float
        Time without a sign of life of a driver after which the next job's driver counts it as dead.
    samples_s : float
        Time for preprocessors to prepare a batch; leaders of nodes without progress are given up after half
        of it, so that trainers have the rest to continue without them.
    lockstep_s : float
        Time for members that share in lockstep to join the ring, and for their leaders to begin.
    leaders_s : float
        Time for the leaders of nodes to load the data and connect.
    command_s : float
        Time for a command of the batch system to answer.
    """

    hang_s: float = 900.0
    meeting_s: float = 300.0
    join_s: float = 300.0
    silence_s: float = 30.0
    ending_s: float = 3.0
    orphaned_s: float = 120.0
    lease_s: float = 420.0
    samples_s: float = 600.0
    lockstep_s: float = 60.0
    leaders_s: float = 300.0
    command_s: float = 60.0


USUAL_TIMEOUTS = Timeouts()


@dataclass(frozen=True)
class SiteKey:
    """Effective value of a key of a site, and its place; no file for a default.

    Parameters
    ----------
    measured_at : float or None
        Time of a measurement that stands for a missing value, in seconds since the epoch; else None.
    """

    key: str
    value: Any
    file: str | None = None
    line: int | None = None
    measured_at: float | None = None


OF_COMMUNICATION = ("NCCL_", "RCCL_", "GLOO_", "HOROVOD_GLOO_", "FI_")
"""Prefixes of environment variables of NCCL, RCCL, Gloo and libfabric; a site gives defaults for these."""


def yields(variable: str) -> bool:
    """Return true if a site's value of a variable is a default that the user's own value overrides."""
    return variable.startswith(OF_COMMUNICATION)


@dataclass(frozen=True)
class Site:
    """Machine as described by its site file.

    Parameters
    ----------
    device : str
        ``gpu``, or ``slot`` at a site without GPUs, where a slot replaces a GPU throughout.
    launch : str
        `NODES` or `MEMBERS`.
    memory_per_node : int
        Memory of each node in bytes.
    submit_by : str
        ``file`` if the submit command takes the script's path, ``stdin`` if it reads the script.
    setup : tuple of str
        Shell lines that prepare the environment at the top of every script.
    directives : tuple of str
        Extra lines for the batch system, without ``#SBATCH`` or ``#BSUB``.
    environment : mapping
        Variables of every step; those that match `OF_COMMUNICATION` only if the user has not set them.
    mpi : str or None
        MPI plugin of the launcher (``srun --mpi=...``).
    node_types : tuple of NodeType
        Node types of a site with several types of GPU; plans assume that jobs get nodes in this order.
    queue_option : str
        Option that names the queue to Slurm: ``partition`` or ``qos``.
    visible_devices : str
        Variable that lists the GPUs visible to a process.
    gpu_memory : int or None
        Memory of each GPU in bytes if `node_types` does not give it; None: unknown.
    links : NodeLinks or None
        Links between GPUs, for pipelines; None: unknown.
    network : NetworkInterfaces
        Network interfaces of its nodes.
    timeouts : Timeouts
        Time limits of its jobs.
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
        """Return the bytes of a GPU of a type; None if unknown."""
        own = {kind.gpu_type: kind.gpu_memory for kind in self.node_types}.get(gpu_type or "")
        return self.gpu_memory if own is None else own

    def types_in(self, cluster: Cluster) -> tuple[str, ...]:
        """Return the types of GPU of a job's nodes, as layer profiles name them; `""` without a name."""
        return tuple(sorted({node.gpu_type or self.gpu_type or "" for node in cluster.nodes}))

    def memory_in(self, cluster: Cluster) -> Mapping[str, int | None]:
        """Return the bytes of a GPU of a job's nodes by type; None if unknown."""
        return {gpu_type: self.memory_of(gpu_type) for gpu_type in self.types_in(cluster)}

    def type_of(self, node: str) -> str | None:
        """Return the GPU type of a node, if the site has several types."""
        for node_type in self.node_types:
            # The first type that matches counts: exceptions can be listed before a general pattern.
            if any(fnmatch.fnmatch(node, pattern) for pattern in node_type.hosts):
                return node_type.gpu_type
        return None

    def yielding_to(self, environment: Mapping[str, str]) -> Site:
        """Return the site with the user's values of the variables of communication libraries."""
        # The script must not export these: it submits the next job, which would take them for the user's own.
        set_by_user = {n: environment[n] for n in self.environment if yields(n) and n in environment}
        return replace(self, environment={**self.environment, **set_by_user})

    @property
    def gpus(self) -> int:
        """Number of GPUs of the whole site."""
        return self.nodes * self.gpus_per_node

    @property
    def gpus_of_one_type(self) -> int:
        """Number of GPUs of the most frequent type."""
        return max((one.nodes for one in self.node_types), default=self.nodes) * self.gpus_per_node

    @property
    def cores_per_gpu(self) -> int:
        """Cores per GPU, at least one."""
        return max(1, self.cores_per_node // self.gpus_per_node)

    @property
    def requested_cores(self) -> int:
        """Cores that jobs and their steps request on each node: as many for each GPU."""
        return self.gpus_per_node * self.cores_per_gpu

    @property
    def memory_per_gpu(self) -> int:
        """Bytes of a node's memory per GPU."""
        return self.memory_per_node // self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Node:
    """Node of an allocation, with its GPUs that belong to the allocation; all are of one type."""

    name: str
    gpus: tuple[int, ...]
    gpu_type: str | None = None


@dataclass(frozen=True)
class Cluster:
    """Nodes that a plan may use."""

    nodes: tuple[Node, ...]

    @classmethod
    def of(cls, gpus: int, gpus_per_node: int) -> Cluster:
        """Return `gpus` GPUs on as few unnamed nodes as possible (``node-0``, ``node-1``, ..)."""
        nodes = []
        for index in range(-(-gpus // gpus_per_node)):
            here = min(gpus_per_node, gpus - index * gpus_per_node)
            nodes.append(Node(f"node-{index}", tuple(range(here))))
        return cls(tuple(nodes))

    @classmethod
    def at(cls, site: Site, gpus: int) -> Cluster:
        """Return `gpus` GPUs of a site, of the types that the site lists first."""
        parts: dict[str, tuple[int, int]] = {}
        left = gpus
        for node_type in site.node_types:
            here = min(left, node_type.nodes * site.gpus_per_node)
            if here:
                # Several kinds of node may have one type of GPU.
                before, _ = parts.get(node_type.gpu_type, (0, 0))
                parts[node_type.gpu_type] = before + here, site.gpus_per_node
            left -= here
        return cls.of_types(parts) if parts else cls.of(gpus, site.gpus_per_node)

    @classmethod
    def of_types(cls, gpus: Mapping[str, tuple[int, int]]) -> Cluster:
        """Return GPUs of several types, (number, largest number per node) by type; "" is an unknown type."""
        nodes: list[Node] = []
        for gpu_type, (count, gpus_per_node) in gpus.items():
            nodes += [
                Node(f"node-{index}", node.gpus, gpu_type or None)
                for index, node in enumerate(cls.of(count, gpus_per_node).nodes, start=len(nodes))
            ]
        return cls(tuple(nodes))

    @property
    def gpus(self) -> int:
        """Number of GPUs on all nodes."""
        return sum(len(node.gpus) for node in self.nodes)

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs of the largest node."""
        return max(len(node.gpus) for node in self.nodes)
