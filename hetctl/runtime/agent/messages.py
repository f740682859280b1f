"""Messages between the driver of a job and its agents, as lines of JSON.

The driver's are `Welcome`, and then dictionaries with one of the keys `START`, `SIGNAL`, `TO` and `LEAVE`.
The agent's are its `AgentFacts`, and then dictionaries with `FROM`, with `ENDED`, or empty as a heartbeat.
"""

from __future__ import annotations

from dataclasses import dataclass, field

START = "start"
"""Number of a GPU: fork a rank on it."""
SIGNAL = "signal"
"""Number of a signal for the rank on ``gpu``."""
TO, FROM = "to", "from"
"""Number of a GPU: ``message`` is for the rank on it, or from it."""
LEAVE = "leave"
"""The driver's last message: the job ends in order."""
ENDED = "ended"
"""Number of a GPU whose rank has ended with ``exit_code``; with its `OVERUSE` where that was why."""
OVERUSE = "overuse"
"""An `Overuse`."""


@dataclass(frozen=True)
class GpuFacts:
    """A GPU that processes on the node see.

    Parameters
    ----------
    cores : tuple of int
        Those near it; empty: not known.
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
        Those of the variables that launchers name nodes by which the agent has.
    cores : tuple of int
        That it may use.
    gpus : tuple of GpuFacts
        In the order in which processes see them; empty where no management library tells.
    devices : dict
        Those of the variables that name GPUs which the agent has.
    """

    step: str
    host: str
    variables: dict[str, str]
    cores: tuple[int, ...]
    gpus: tuple[GpuFacts, ...] = ()
    devices: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Welcome:
    """The driver's answer: the resource set that the agent holds.

    Parameters
    ----------
    node : str
        Name of the node, as the batch system calls it.
    gpus : tuple of int
        Numbers of the GPUs or slots, as plans have them, in the order in which processes see them.
    device : str
        ``gpu`` or ``slot``, as the site says.
    cores_per_gpu : int
        Of each rank.
    memory_per_gpu : int
        Bytes: each rank's share of the node's.
    orphaned_s : float
        As of the site's `Timeouts`.
    """

    node: str
    gpus: tuple[int, ...]
    device: str
    cores_per_gpu: int
    memory_per_gpu: int
    orphaned_s: float


@dataclass(frozen=True)
class Overuse:
    """Memory of a rank that was ended since it had more than its share, and the node no more room.

    Parameters
    ----------
    peak : int
        Bytes that it had to itself when it was ended.
    share : int
        Bytes.
    """

    peak: int
    share: int
