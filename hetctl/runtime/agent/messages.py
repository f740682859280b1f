"""Messages between the driver of a job and the agents of its nodes, as lines of JSON.

The driver's are `Welcome`, and then dictionaries with one of the keys `START`, `SIGNAL`, `TO` and `LEAVE`.
The agent's are its `NodeFacts`, and then dictionaries with `FROM`, with `ENDED`, or empty as a heartbeat.
"""

from __future__ import annotations

from dataclasses import dataclass

START = "start"
"""Number of a GPU: fork a rank on it."""
SIGNAL = "signal"
"""Number of a signal for the rank on ``gpu``."""
TO, FROM = "to", "from"
"""Number of a GPU: ``message`` is for the rank on it, or from it."""
LEAVE = "leave"
"""The driver's last message: the job ends in order."""
ENDED = "ended"
"""Number of a GPU whose rank has ended with ``exit_code``."""


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
class NodeFacts:
    """Facts that an agent found about its node.

    Parameters
    ----------
    host : str
        Name of the machine.
    variables : dict
        Those of the variables that launchers name nodes by which the agent has.
    cores : tuple of int
        That it may use.
    gpus : tuple of GpuFacts
        In the order in which processes see them; empty where no management library tells.
    """

    host: str
    variables: dict[str, str]
    cores: tuple[int, ...]
    gpus: tuple[GpuFacts, ...] = ()


@dataclass(frozen=True)
class Welcome:
    """The driver's answer: the node's share of the job.

    Parameters
    ----------
    node : str
        Name of the node, as the batch system calls it.
    gpus : tuple of int
        Numbers of the GPUs or slots, in the order in which processes see them.
    device : str
        ``gpu`` or ``slot``, as the site says.
    cores_per_gpu : int
        Of each rank.
    """

    node: str
    gpus: tuple[int, ...]
    device: str
    cores_per_gpu: int
