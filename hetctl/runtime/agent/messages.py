"""Messages between the driver of a job and its agents, as lines of JSON.

The driver sends `AgentAssignment`, or `SHUTDOWN` to an agent that it does not need, or `REJECTED` to one that
it cannot use, and then dictionaries with one of the keys `START`, `SIGNAL`, `TO`, `FETCH`, `FORGET` and
`SHUTDOWN`. The agent sends its `AgentFacts`, and then dictionaries with `FROM`, `ENDED`, `STAGED`, `STATES`
or `FETCHED`. Empty ones are heartbeats of either.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetctl.model.site import USUAL_TIMEOUTS

START = "start"
"""Key with the framework, or None, from whose template a rank is forked on ``gpu``."""
SIGNAL = "signal"
"""Key with the number of a signal for the rank on ``gpu``."""
TO, FROM = "to", "from"
"""Keys with a message for the rank on ``gpu``, or from it."""
SHUTDOWN = "shutdown"
"""Key of the driver's last message: the agent is not needed any more."""
REJECTED = "rejected"
"""Key with the reason for which the driver cannot use the agent."""
ENDED = "ended"
"""Key with the exit code of the rank on ``gpu``, which has ended, with `OVERUSE` if that is why."""
STAGED = "staged"
"""Key with the `StagedPartitions` of the node: its ranks are forked from now on."""
STATES = "states"
"""Key with the address of the node's store of states, and ``partitions``, the numbers that exist there."""
FETCH, FETCHED = "fetch", "fetched"
"""Keys of the driver's order to copy a state from the store at ``address``, and of its `StateFetched`."""
FORGET = "forget"
"""Key with the names of states that the agent deletes from its store."""
OVERUSE = "overuse"
"""Key with an `Overuse`, or None."""


@dataclass(frozen=True)
class GpuFacts:
    """A GPU that processes on the node see.

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
    """Facts that an agent found about its node, or about the part of it that it may use.

    Parameters
    ----------
    step : str
        Name of the step that started the agent.
    host : str
        Name of the machine.
    variables : dict
        Values of variables in which launchers give the node's name, as far as they are set.
    cores : tuple of int
        Numbers of the cores that the agent may use.
    gpus : tuple of GpuFacts
        GPUs in the order in which processes see them; empty if no management library lists them.
    devices : dict
        Values of variables that name visible GPUs, as far as they are set.
    """

    step: str
    host: str
    variables: dict[str, str]
    cores: tuple[int, ...]
    gpus: tuple[GpuFacts, ...] = ()
    devices: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PartitionToStage:
    """A partition that an agent copies to its node.

    Parameters
    ----------
    source, path : str
        Paths from which and to which it is copied, with variables of the node.
    """

    number: int
    source: str
    path: str


@dataclass(frozen=True)
class StageOrder:
    """Partitions of the data that an agent copies to its node before it forks ranks.

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
        Name of the run that no other run has, as of `run_key`.
    partitions : tuple of str
        Path of each partition, with variables of the node.
    control : tuple of str
        Patterns of the network interfaces over which states are copied; empty: any.
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
        Numbers of the partitions that were copied, and of those that were there already.
    bytes : int
        Size of the copied partitions.
    duration_s : float
        Time of copying and checking.
    errors : tuple of str
        Reason for each partition that is missing now.
    """

    node: str
    copied: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    bytes: int = 0
    duration_s: float = 0.0
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class AgentAssignment:
    """Answer of the driver: the resource set that the agent holds.

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


@dataclass(frozen=True)
class Overuse:
    """Memory use of a rank that was ended since it exceeded its share and the node's memory was nearly full.

    Parameters
    ----------
    peak : int
        Private memory of the rank when it was ended, in bytes.
    share : int
        Share of the rank, in bytes.
    """

    peak: int
    share: int
