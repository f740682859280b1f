"""Sites with their queues and links, and the nodes of one allocation."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any

from hetctl.model.cost import NODES as WHOLE_NODES
from hetctl.model.cost import USUAL_BILLING, Billing, Cost
from hetctl.model.file_keys import DURATION, Bytes, Key, Limits, Pattern
from hetctl.model.training_settings import AUTO
from hetctl.model.values import dataclass

MOST_PER_GPU = 16
PER_GPU = (AUTO, *range(1, MOST_PER_GPU + 1))
"""Values of `max_per_gpu`."""
NODES, MEMBERS = "nodes", "members"
"""Resource sets of agents: whole nodes for a job, or a member's GPUs on a node for a round."""


# Control characters and line ends would break out of a line of the script that the value is put into.
BREAKS = r"\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029"
Line = Annotated[
    str,
    Pattern(rf"[^{BREAKS}]*[^\s{BREAKS}][^{BREAKS}]*", "must be one line of text without control characters"),
]
# A directive must not begin with '#': the template adds #SBATCH or #BSUB itself.
Directive = Annotated[
    str,
    Pattern(
        rf"[^#\s{BREAKS}][^{BREAKS}]*",
        "must be one line of options for the batch system, without #SBATCH or #BSUB",
    ),
]
Word = Annotated[
    str,
    Pattern(
        r"[A-Za-z0-9_][A-Za-z0-9._@:+/-]*",
        "must be one word of A-Z a-z 0-9 . _ @ : + / - that starts with a letter, a digit or _",
    ),
]
Variable = Annotated[str, Pattern(r"[A-Za-z_][A-Za-z0-9_]*", "must be the name of an environment variable")]
CpuList = Annotated[
    str,
    Pattern(
        r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*", "must be a list of cores such as 49-55,113"
    ),
]
Interface = Annotated[
    str,
    Pattern(
        # The kernel limits names of network interfaces to 15 characters (IFNAMSIZ).
        r"[A-Za-z0-9_.:-]{1,15}|[A-Za-z0-9_.:*?\[\]!-]*[*?\[][A-Za-z0-9_.:*?\[\]!-]*",
        "must be the name of a network interface (at most 15 characters) or a pattern such as hsn*",
    ),
]


@dataclass(frozen=True)
class Queue:
    """Queue (a partition in Slurm's words) and its limits."""

    name: Annotated[Word, Key("Name of the queue at the batch system.")]
    max_nodes: Annotated[int | None, Key("Maximum number of nodes of one job; null: no limit.", ge=1)] = None
    max_wall_s: Annotated[
        int | None,
        Key("Maximum wall-clock time of one job, such as 2h, 90m or 2:00:00; null: no limit.", form=DURATION),
    ] = None
    min_nodes: Annotated[int | None, Key("Minimum number of nodes of one job; null: no limit.", ge=1)] = None
    max_jobs: Annotated[
        int | None, Key("Maximum number of a user's jobs in the queue; null: no limit.", ge=1)
    ] = None
    max_running: Annotated[
        int | None, Key("Maximum number of a user's jobs that run at a time; null: no limit.", ge=1)
    ] = None
    chain: Annotated[bool, Key("False where a job must not submit or await another one.")] = True


GRES, GPUS_PER_NODE, LEFT_OUT = "gres", "gpus-per-node", "none"


@dataclass(frozen=True)
class ResourceRequest:
    """Options by which jobs, and steps of Slurm, request a node's resources; PBS has ``select`` alone."""

    gpus: Annotated[
        str,
        Key(
            "GPUs: by --gres or --gpus-per-node; none where jobs get whole nodes.",
            choices=(GRES, GPUS_PER_NODE, LEFT_OUT),
        ),
    ] = GRES
    memory: Annotated[
        str, Key("Memory: by --mem; none where jobs get whole nodes.", choices=("mem", LEFT_OUT))
    ] = "mem"
    cores: Annotated[
        str,
        Key(
            "Cores of jobs: --mincpus, or --cpus-per-task of one task a node; none: one task on whole nodes.",
            choices=("mincpus", "cpus-per-task", LEFT_OUT),
        ),
    ] = "mincpus"


USUAL_REQUEST = ResourceRequest()

CONTAINER_ENGINES = (
    *("apptainer", "singularity", "podman", "podman-hpc"),
    *("shifter", "pyxis", "charliecloud"),
)


@dataclass(frozen=True)
class Container:
    """Container in which the processes of members run."""

    image: Annotated[Line, Key("Image, as the engine takes it: a file, a folder or a name.")]
    engine: Annotated[str, Key("Program that runs it.", choices=CONTAINER_ENGINES)]
    binds: Annotated[
        tuple[Line, ...],
        Key("Folders seen inside beside the project's: PATH, or PATH:PATH_INSIDE."),
    ] = ()
    gpus: Annotated[str, Key("GPUs that are seen inside.", choices=("nvidia", "amd", LEFT_OUT))] = "nvidia"
    python: Annotated[Line, Key("Python in the image, with the framework.")] = "python3"
    options: Annotated[tuple[Line, ...], Key("Additional options of the engine.")] = ()


@dataclass(frozen=True)
class Purge:
    """Deletion by the site of files that nobody has used for some days."""

    days: Annotated[int, Key("Days without use after which files are deleted.", ge=1)]
    folders: Annotated[
        tuple[Line, ...], Key("Folders where files are deleted, * for any text.", min_length=1)
    ]
    touch: Annotated[
        bool, Key("Let `hetctl advance` renew the times of a run's files, where the site allows that.")
    ] = False

    def takes(self, *paths: str) -> bool:
        """Return true if files below one of the paths are deleted."""
        return any(fnmatch.fnmatch(f"{path}/", each) for path in paths for each in self.folders)


@dataclass(frozen=True)
class NodeType:
    """Nodes with the same type of GPU, on a machine with several types."""

    gpu_type: Annotated[Line, Key("Model of the GPUs, as reported by `hetctl profile`.")]
    nodes: Annotated[int, Key("Number of nodes with this type.", ge=1)]
    hosts: Annotated[
        tuple[Line, ...],
        Key(
            "Host names of these nodes, * for any text, by which the type of a job's node is found.",
            min_length=1,
        ),
    ]
    gpu_memory: Annotated[Bytes | None, Key("Memory of each GPU; null: the site's gpu_memory.")] = None


@dataclass(frozen=True)
class NetworkInterfaces:
    """Network of the nodes: interfaces as names or patterns, of which the first that a node has is used."""

    control: Annotated[
        tuple[Interface, ...],
        Key("For connections between driver and compute nodes; []: the one of the host name."),
    ] = ()
    gloo: Annotated[
        tuple[Interface, ...],
        Key("For Gloo; []: the one by which a rank reaches the other ranks of its group."),
    ] = ()
    encrypt_data: Annotated[
        bool, Key("Encrypt tensors, samples and states that hetctl sends between nodes.")
    ] = True
    bytes_per_s: Annotated[
        float | None, Key("Bytes/s that all interfaces of a node send together; null: unknown.", gt=0)
    ] = None
    plugin: Annotated[
        Line | None,
        Key("Line of `setup` without which NCCL or RCCL would use TCP between nodes; null: none."),
    ] = None


ANY_INTERFACES = NetworkInterfaces()

Positive = Annotated[float, Limits(gt=0)]
Point = tuple[Positive, Positive]
"""Size of a message in bytes, and its transfer time in seconds."""
Points = Annotated[tuple[Point, ...], Key("Measured transfers, each as [bytes, seconds].")]


@dataclass(frozen=True)
class IntraNode:
    """Links between the GPUs of a node: peak bandwidth, with either scaling or points."""

    bytes_per_s: Annotated[float, Key("Peak bandwidth in bytes/s.", gt=0)]
    scaling: Annotated[float | None, Key("Fraction of the peak bandwidth that is reached.", gt=0, le=1)] = (
        None
    )
    points: Points = ()


@dataclass(frozen=True)
class InterNode:
    """Links between nodes: either latency_s and bytes_per_s, or points."""

    latency_s: Annotated[float | None, Key("Latency of a message in seconds.", ge=0)] = None
    bytes_per_s: Annotated[float | None, Key("Bandwidth in bytes/s.", gt=0)] = None
    points: Points = ()


@dataclass(frozen=True)
class NodeLinks:
    """Links between GPUs, for pipelines."""

    intra_node: Annotated[IntraNode, Key("Links between the GPUs of a node.")]
    inter_node: Annotated[InterNode, Key("Links between nodes.")]


HEARTBEAT_EVERY_S = 2.0
"""Interval in seconds between heartbeats of an agent, and of a rank at work."""
LEASE_SHARE = 0.8
"""Share of the time limit for silent processes after which a silent process ends itself.

What it has begun has thus ended when others take its place.
"""


@dataclass(frozen=True)
class Timeouts:
    """Time limits of waits."""

    hang_s: Annotated[
        float, Key("Time without a heartbeat from any rank after which a group counts as hung", form=DURATION)
    ] = 900.0
    meeting_s: Annotated[
        float, Key("Time limit for the ranks of a group to connect to one another", form=DURATION)
    ] = 300.0
    join_s: Annotated[
        float,
        Key("Time limit for the agent of a node to connect to the driver after its launch", form=DURATION),
    ] = 300.0
    silence_s: Annotated[
        float, Key("Time without a message after which an agent and its node count as lost", form=DURATION)
    ] = 30.0
    ending_s: Annotated[
        float, Key("Time limit for the ranks of a failed group to end by themselves", form=DURATION)
    ] = 3.0
    orphaned_s: Annotated[
        float,
        Key(
            "Time limit for the script to end a job whose driver has ended; later its agents end it",
            form=DURATION,
        ),
    ] = 120.0
    lease_s: Annotated[
        float,
        Key(
            "Time without a sign of life of a job's driver after which the next job counts it as dead",
            form=DURATION,
        ),
    ] = 420.0
    # After half of it, trainers go on without leaders of nodes that make no progress.
    samples_s: Annotated[float, Key("Time limit for preprocessors to prepare a batch", form=DURATION)] = 600.0
    lockstep_s: Annotated[
        float,
        Key("Time limit for members and leaders that share data in lockstep to start", form=DURATION),
    ] = 60.0
    leaders_s: Annotated[
        float, Key("Time limit for the leaders of nodes to load the data and connect", form=DURATION)
    ] = 300.0
    command_s: Annotated[
        float, Key("Time limit for a command of the batch system to answer", form=DURATION)
    ] = 60.0


USUAL_TIMEOUTS = Timeouts()


@dataclass(frozen=True)
class SiteKey:
    """Effective value of a site's key, and its place; a default has no file.

    Parameters
    ----------
    measured_at : float or None
        Time of the measurement that replaces a missing value, in seconds since the epoch; else None.
    """

    key: str
    value: Any
    file: str | None = None
    line: int | None = None
    measured_at: float | None = None


MIG_PROFILE = re.compile(r"\dg\.\d+gb", re.IGNORECASE)
"""Profile of a MIG device: slices of the GPU and of its memory."""
OF_COMMUNICATION = ("NCCL_", "RCCL_", "GLOO_", "HOROVOD_GLOO_", "FI_")
"""Prefixes of variables of NCCL, RCCL, Gloo and libfabric; a site only gives defaults for these."""


def is_overridable(variable: str) -> bool:
    """Return true if a site's value of a variable is a default that the user's own value overrides."""
    return variable.startswith(OF_COMMUNICATION)


@dataclass(frozen=True)
class Site:
    """Machine: its batch system, nodes and queues, and the launcher of its jobs.

    Variables of `environment` that match `OF_COMMUNICATION` are set only if the user has not set them. Plans
    assume that jobs get nodes in the order of `node_types`.
    """

    name: str
    batch_system: str
    launcher: str
    nodes: Annotated[int, Key("Number of compute nodes of the machine.", ge=1)]
    gpus_per_node: Annotated[int, Key("Number of GPUs per node; of slots if device is slot.", ge=1)]
    cores_per_node: Annotated[int, Key("Number of cores per node that jobs may use.", ge=1)]
    memory_per_node: Annotated[Bytes, Key("Memory per node, such as 512GB, 480GiB or a number of bytes.")]
    queues: Annotated[
        tuple[Queue, ...],
        Key(
            "Queues; several entries of one name, with rising max_nodes, are its limits by job size.",
            min_length=1,
        ),
    ]
    launch: Annotated[
        str,
        Key(
            "nodes: one step per job, on all nodes. members: one step per member and round.",
            choices=(NODES, MEMBERS),
        ),
    ] = NODES
    device: Annotated[
        str,
        Key(
            "slot on a machine without GPUs, where a share of the cores takes the place of a GPU.",
            choices=("gpu", "slot"),
        ),
    ] = "gpu"
    gpu_type: Annotated[
        Line | None,
        Key("Model of the GPUs, such as V100; of MIG devices with the profile, such as A100-1g.10gb."),
    ] = None
    gpu_memory: Annotated[
        Bytes | None, Key("Memory of each GPU, such as 16GB; null: not taken into account.")
    ] = None
    max_per_gpu: Annotated[
        int | str,
        Key(
            "Largest number of members on one GPU, unless --max-per-gpu says another; auto: as gpu_memory"
            " permits, 1 on slots.",
            choices=PER_GPU,
        ),
    ] = AUTO
    mps: Annotated[
        bool,
        Key("Let processes that share a GPU run kernels at once, by NVIDIA's MPS: agents start and end it."),
    ] = False
    gpu_cores: Annotated[
        tuple[CpuList, ...],
        Key("Cores near each GPU in the order of their numbers, where no management library tells them."),
    ] = ()
    links: Annotated[
        NodeLinks | None, Key("Bandwidth and latency between GPUs, for pipelines; null: unknown.")
    ] = None
    network: Annotated[
        NetworkInterfaces,
        Key("Network interfaces for control connections and for Gloo, and encryption."),
    ] = ANY_INTERFACES
    timeouts: Annotated[Timeouts, Key("Time limits of waits, each such as 30s or 15m.")] = USUAL_TIMEOUTS
    visible_devices: Annotated[
        Variable,
        Key("Environment variable with the GPUs visible to a process, such as ROCR_VISIBLE_DEVICES for AMD."),
    ] = "CUDA_VISIBLE_DEVICES"
    node_types: Annotated[
        tuple[NodeType, ...],
        Key("Types of GPU of a machine with several; their nodes must add up to `nodes`."),
    ] = ()
    queue: Annotated[
        Word | tuple[Word, ...] | None,
        Key("Queue to use, or several of which the one that starts a job first is; null: the first one."),
    ] = None
    queue_option: Annotated[
        str,
        Key(
            "Slurm option that takes the queue: --partition, or --qos as at NERSC.",
            choices=("partition", "qos"),
        ),
    ] = "partition"
    account: Annotated[Word | None, Key("Project or account that jobs are charged to.")] = None
    billing: Annotated[
        Billing, Key("Charge for jobs, by which costs are told, and CO2 of the electricity.")
    ] = USUAL_BILLING
    request: Annotated[ResourceRequest, Key("Options that request a node's resources.")] = USUAL_REQUEST
    job_options: Annotated[
        Mapping[Word, Line],
        Key("Options of jobs by name, such as qos or reservation; --job-option goes over them."),
    ] = field(default_factory=dict)
    requeue: Annotated[
        bool, Key("True if the batch system may requeue jobs of runs, which then go on from checkpoints.")
    ] = False
    query_interval_s: Annotated[
        float | None,
        Key(
            "Least time between queries of the batch system by a command that watches; null: 10s.",
            form=DURATION,
        ),
    ] = None
    submit_by: Annotated[
        str,
        Key(
            "Input of the submit command: the file name of the script, or its text on stdin.",
            choices=("file", "stdin"),
        ),
    ] = "file"
    max_queued_jobs: Annotated[
        int | None, Key("Maximum number of queued jobs per user; null: no limit.", ge=1)
    ] = None
    template: Annotated[
        Annotated[
            str, Pattern(r"[A-Za-z0-9][A-Za-z0-9._-]*\.j2", "must be the file name of a template, NAME.j2")
        ]
        | None,
        Key("File name of the script's template; null: the batch system's own."),
    ] = None
    directives: Annotated[
        tuple[Directive, ...],
        Key("Additional options for the batch system, without #SBATCH or #BSUB."),
    ] = ()
    setup: Annotated[
        tuple[Line, ...],
        Key("Shell lines at the start of every script, which prepare its environment."),
    ] = ()
    environment: Annotated[
        Mapping[
            Variable,
            Annotated[str, Pattern(rf"[^{BREAKS}]*", "must be one line of text without control characters")],
        ],
        Key("Environment variables of every step; values are text."),
    ] = field(default_factory=dict)
    mpi: Annotated[Word | None, Key("MPI plugin of the launcher, as in srun --mpi=pmix.")] = None
    python: Annotated[
        Line | None, Key("Python interpreter on the compute nodes; null: the one that submits.")
    ] = None
    container: Annotated[Container | None, Key("Container in which members are trained; null: none.")] = None
    stage: Annotated[
        Line | None,
        Key("Archive of the Python environment that each node gets before agents start; null: none."),
    ] = None
    stage_folder: Annotated[
        Line, Key("Folder on the disk or in the memory of each node, with its variables, for `stage`.")
    ] = "/tmp"
    shared_with: Annotated[
        str,
        Key(
            "Other users of the runs: none, or the group of the project's folder.",
            choices=(LEFT_OUT, "group"),
        ),
    ] = LEFT_OUT
    purge: Annotated[
        Purge | None, Key("Deletion of files that nobody has used for some days; null: none is known.")
    ] = None
    host_patterns: Annotated[
        tuple[Line, ...],
        Key("Host names of the login nodes, * for any text, by which the site is detected."),
    ] = ()

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

    def with_overrides(self, environment: Mapping[str, str]) -> Site:
        """Return the site with the user's values of communication libraries' variables."""
        # The script must not export these: the next job, which it submits, would take them for the user's.
        set_by_user = {n: environment[n] for n in self.environment if is_overridable(n) and n in environment}
        return replace(self, environment={**self.environment, **set_by_user})

    @property
    def shell_setup(self) -> tuple[str, ...]:
        """Lines of `setup`, after one that makes ``module`` available where a line needs it.

        A script of a batch system has it only if the submitting shell has passed it on.
        """
        uses_modules = any(line.split()[0] in ("module", "ml") for line in self.setup)
        login = ("type module >/dev/null 2>&1 || . /etc/profile >/dev/null",) if uses_modules else ()
        return (*login, *self.setup)

    @property
    def wanted_queues(self) -> tuple[str, ...]:
        """Names of the queues to use, the usual one first; empty: any."""
        return (self.queue,) if isinstance(self.queue, str) else self.queue or ()

    @property
    def gpus(self) -> int:
        """Number of GPUs of the whole site."""
        return self.nodes * self.gpus_per_node

    def cost(self, node_seconds: float, gpus: int) -> Cost:
        """Return the cost of jobs with so many GPUs each, by the time of all their nodes."""
        nodes = -(-gpus // self.gpus_per_node)
        by_nodes = self.billing.unit == WHOLE_NODES
        node_hours = node_seconds / 3600
        gpu_hours = node_hours * (self.gpus_per_node if by_nodes else gpus / nodes)
        return Cost(node_hours, gpu_hours, self.billing.factor * (node_hours if by_nodes else gpu_hours))

    @property
    def has_mig(self) -> bool:
        """True if its GPUs are MIG devices, by the name of a type: members have one each."""
        types = (self.gpu_type, *(one.gpu_type for one in self.node_types))
        return any(MIG_PROFILE.search(gpu_type or "") for gpu_type in types)

    @property
    def gpus_of_one_type(self) -> int:
        """Number of GPUs of the most frequent type."""
        return max((one.nodes for one in self.node_types), default=self.nodes) * self.gpus_per_node

    @property
    def cores_per_gpu(self) -> int:
        """Cores per GPU, at least one."""
        return max(1, self.cores_per_node // self.gpus_per_node)

    @property
    def other_python(self) -> str | None:
        """Python that trains, or the archive with it, if it is not the one that submits."""
        return self.container.python if self.container else self.stage or self.python

    @property
    def requests_gpus(self) -> bool:
        """True if jobs and steps request GPUs by an option."""
        return self.device == "gpu" and self.request.gpus != LEFT_OUT

    @property
    def requested_cores(self) -> int:
        """Cores that jobs and their steps request on each node, equally many for each GPU."""
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
                # Several kinds of node may have the same type of GPU.
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
