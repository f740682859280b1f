"""Messages between the driver of a job and its agents, as lines of JSON.

The agent first sends its `AgentFacts`. The driver answers with `AgentAssignment`, with `SHUTDOWN` if it does
not need the agent, or with `REJECTED` if it cannot use it. Then the driver sends dictionaries with one of the
keys `START`, `SIGNAL`, `TO`, `FETCH`, `FORGET` and `SHUTDOWN`, and the agent with `FROM`, `ENDED`, `STAGED`,
`STATES` or `FETCHED`. Empty dictionaries are heartbeats of either; those of an agent may have `ENERGY`.
Before all that, a node may ask for a source of its `ENVIRONMENT`.
"""

from __future__ import annotations

import os
from dataclasses import field

from hetctl.model.site import USUAL_TIMEOUTS
from hetctl.model.values import dataclass
from hetctl.runtime.transport import Address

START = "start"
"""Key with the framework, or None, whose template forks a rank on ``gpu``."""
SIGNAL = "signal"
"""Key with the number of a signal for the rank on ``gpu``."""
TO, FROM = "to", "from"
"""Keys with a message to or from the rank on ``gpu``."""
COMMAND = "command"
"""Key, in a message from a rank, of the process of its command that a warm Python has forked."""
SHUTDOWN = "shutdown"
"""Key of the driver's last message: it does not need the agent."""
REJECTED = "rejected"
"""Key with the reason why the driver cannot use the agent."""
ENDED = "ended"
"""Key with the exit code of the ended rank on ``gpu``, beside `OVERUSE` if that is why."""
STAGED = "staged"
"""Key with the node's `StagedPartitions`: ranks can be forked from now on."""
STATES = "states"
"""Key with the address of the node's store of states, beside ``partitions``, the node's numbers."""
FETCH, FETCHED = "fetch", "fetched"
"""Keys of an order to copy a state from the store at ``address``, and of its result, a `StateFetched`."""
ENERGY = "energy"
"""Key with pairs of a GPU's or slot's number and the joules that it has used since the agent began."""
FORGET = "forget"
"""Key with the names of states that the agent must delete."""
OVERUSE = "overuse"
"""Key with an `Overuse`, or None."""
ENVIRONMENT = "environment"
"""Key with the `SourceRequest` of an agent to be, and of the answer: the address of a source, or None."""


@dataclass(frozen=True)
class Archive:
    """Archive of the Python environment of a job's agents.

    Parameters
    ----------
    path : str
        Path on the shared file system.
    folder : str
        Folder on each node, with variables of the node.
    bytes : int
        Size of the archive.
    key : str
        Name of the environment on a node, different for each version of the archive.
    control : tuple of str
        Patterns of the network interfaces by which nodes send it; empty for any.
    """

    path: str
    folder: str
    bytes: int
    key: str
    control: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the file in `folder` that the batch system's own broadcast makes."""
        return f"hetctl-{os.geteuid()}-{self.key}"


@dataclass(frozen=True)
class SourceRequest:
    """Question of a node for a source of the archive.

    Parameters
    ----------
    address : Address
        Place where the node itself serves what it has.
    failed : str
        Name of the last source, if that has failed.
    """

    address: Address
    failed: str = ""


@dataclass(frozen=True)
class GpuFacts:
    """GPU that processes on the node see.

    Parameters
    ----------
    cores : tuple of int
        Numbers of the cores near it; empty if unknown.
    """

    uuid: str
    name: str
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class AgentFacts:
    """Facts of an agent about its node, or about the part of it that it may use.

    Parameters
    ----------
    step : str
        Name of the step that started the agent.
    host : str
        Name of the machine.
    variables : dict
        Values of set variables in which launchers give the node's name.
    cores : tuple of int
        Numbers of the cores that the agent may use.
    gpus : tuple of GpuFacts
        GPUs in the order in which processes see them; empty if no management library lists them.
    devices : dict
        Values of set variables that name visible GPUs.
    """

    step: str
    host: str
    variables: dict[str, str]
    cores: tuple[int, ...]
    gpus: tuple[GpuFacts, ...] = ()
    devices: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PartitionToStage:
    """Partition that an agent copies to its node.

    Parameters
    ----------
    source, path : str
        Paths of origin and copy, with variables of the node.
    """

    number: int
    source: str
    path: str


@dataclass(frozen=True)
class StageOrder:
    """Partitions that an agent copies to its node before it forks ranks.

    Parameters
    ----------
    count : int
        Number of all partitions of the data.
    """

    count: int
    partitions: tuple[PartitionToStage, ...]


@dataclass(frozen=True)
class StoreOrder:
    """Store for the states of members that hop, and the data that they visit.

    Parameters
    ----------
    run_key : str
        Unique name of the run, from `run_key`.
    partitions : tuple of str
        Path of each partition, with variables of the node.
    control : tuple of str
        Patterns of the network interfaces for copies of states; empty for any.
    """

    run_key: str
    partitions: tuple[str, ...]
    control: tuple[str, ...] = ()


@dataclass(frozen=True)
class StagedPartitions:
    """Result of a `StageOrder`.

    Parameters
    ----------
    node : str
        Name of the node.
    copied, kept : tuple of int
        Numbers of the copied partitions, and of those already there.
    bytes : int
        Size of the copied partitions.
    duration_s : float
        Time of copying and checking.
    errors : tuple of str
        Reason for each missing partition.
    """

    node: str
    copied: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    bytes: int = 0
    duration_s: float = 0.0
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class AgentAssignment:
    """Answer of the driver: the agent's resource set.

    Parameters
    ----------
    node : str
        Name of the node in the batch system.
    gpus : tuple of int
        Numbers of the GPUs or slots in plans, in the order in which processes see them.
    device : str
        Kind of device in the site file, ``gpu`` or ``slot``.
    cores_per_gpu : int
        Number of cores of each rank.
    memory_per_gpu : int
        Each rank's share of the node's memory, in bytes.
    silence_s, lease_s : float
        Times of the site's `Timeouts`, in seconds.
    stage : StageOrder or None
        Partitions to copy first.
    store : StoreOrder or None
        Store to open, if members hop.
    gpus_of_node : int
        Number of all GPUs or slots of the node.
    gpu_cores : tuple of str
        Cores near each GPU of the node, as in the site file; empty: unknown there.
    """

    node: str
    gpus: tuple[int, ...]
    device: str
    cores_per_gpu: int
    memory_per_gpu: int
    silence_s: float
    stage: StageOrder | None = None
    store: StoreOrder | None = None
    lease_s: float = USUAL_TIMEOUTS.lease_s
    gpus_of_node: int = 1
    gpu_cores: tuple[str, ...] = ()


@dataclass(frozen=True)
class Overuse:
    """Memory use of a rank that was ended for exceeding its share while memory was nearly full.

    Parameters
    ----------
    peak : int
        Private memory of the rank at its end, in bytes.
    share : int
        Share of the rank, in bytes.
    """

    peak: int
    share: int
