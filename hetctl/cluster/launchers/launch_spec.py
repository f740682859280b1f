"""The values that launchers take and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetctl.model.site import NODES, Site

NODE_VARIABLE = "HETCTL_NODE"
"""Name of the node that an agent is meant for, where launchers give each node variables of its own."""
MEBIBYTE = 2**20


@dataclass(frozen=True)
class ResourceSet:
    """The part of a node that one agent holds.

    Parameters
    ----------
    gpus : tuple of int
        Numbers of its GPUs or slots on the node, as plans have them; cores and memory go with them.
    """

    node: str
    gpus: tuple[int, ...]


@dataclass(frozen=True)
class LaunchSpec:
    """A step of a batch job: one command line, which starts an agent for each of its resource sets.

    Parameters
    ----------
    name : str
        Unique among the steps of a job that run at the same time.
    argv : tuple of str
        The command line, from the launcher's name to the last argument of the process on each node.
    environment : mapping
        Variables to set on top of the driver's own.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]


Launcher = Callable[[Site, str, Sequence[ResourceSet], tuple[str, ...]], LaunchSpec]
"""From a step's name, its resource sets, all on different nodes and of equally many GPUs, and an agent's
command line to the step."""


class NodeShare(NamedTuple):
    """Amount of each node that a step asks for.

    Parameters
    ----------
    memory_mib : int
        0: all that the job has there.
    """

    gpus: int
    cores: int
    memory_mib: int


def share_of(site: Site, sets: Sequence[ResourceSet]) -> NodeShare:
    """Return what a launcher asks for: whole nodes, or what goes with the GPUs of one of the sets."""
    if site.launch == NODES:
        return NodeShare(site.gpus_per_node, site.cores_per_node, 0)
    gpus = len(sets[0].gpus)
    return NodeShare(
        gpus, gpus * site.cores_per_gpu, gpus * site.memory_per_node // (site.gpus_per_node * MEBIBYTE)
    )


def common_environment(site: Site) -> dict[str, str]:
    """Return what every step gets: the site's variables, and output that is not held back."""
    return {"PYTHONUNBUFFERED": "1", **site.environment}
