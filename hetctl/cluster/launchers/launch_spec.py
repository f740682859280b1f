"""Launchers as values, with their input and output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from hetctl.model.events import ExitReason
from hetctl.model.site import NODES, Site
from hetctl.model.values import dataclass

NODE_VARIABLE = "HETCTL_NODE"
"""Variable with the name of an agent's node, where launchers set variables separately for each node."""
MEBIBYTE = 2**20


@dataclass(frozen=True)
class ResourceSet:
    """Part of a node that one agent holds.

    Parameters
    ----------
    gpus : tuple of int
        Numbers of its GPUs or slots on the node, as in plans; cores and memory are in proportion to them.
    """

    node: str
    gpus: tuple[int, ...]


@dataclass(frozen=True)
class LaunchSpec:
    """Step of a batch job: one command line, which starts an agent for each of its resource sets.

    Parameters
    ----------
    name : str
        Name, unique among concurrent steps of a job.
    argv : tuple of str
        Command line, from the launcher's name to the last argument of the process on each node.
    environment : mapping
        Variables to be set in addition to the driver's own.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Launcher:
    """Program that starts the steps of a job.

    Parameters
    ----------
    name : str
        Value of `launcher` in a site file.
    agents : callable
        Function from a step's name, its resource sets (all on different nodes, with equal numbers of GPUs)
        and an agent's command line to the step.
    leaders : callable or None
        Function from a step's name, the names of nodes and a leader's command line to the step that starts a
        process on each node beside the ranks, for rounds in lockstep. None: each node prepares its batches
        itself.
    starts_here : bool
        True if it starts agents on the machine of the driver alone.
    chooses_nodes : bool
        True if it does not accept the nodes on which to start a step.
    script_nodes : int
        Number of leading nodes in a job's list that run the script but no steps.
    most_nodes : int or None
        Most nodes of a job; None: any number.
    whole_nodes : bool
        True if LSF gives its jobs whole nodes (``bsub -nnodes``).
    forbidden_variables : tuple of str
        Environment variables that make it fail.
    on_path : bool
        True if a program of its name must be on the PATH of the compute nodes.
    mpi_fix : str
        Next step where the processes that it starts are not one MPI world.
    exit_lines : str
        Regular expression for the beginning of its lines in the output of a step.
    exit_messages : tuple of tuple
        Regular expressions for the rest of such a line, each with the reason that it gives for the end of a
        task. The first that fits decides: the end of a job precedes its effects on processes.
    exit_codes : mapping of int to ExitReason
        Reasons by exit codes of its own.
    broadcast : tuple of str
        Command that copies a file to all nodes of the job, up to its name and that of the copy.
    """

    name: str
    agents: Callable[[Site, str, Sequence[ResourceSet], tuple[str, ...]], LaunchSpec]
    leaders: Callable[[Site, str, Sequence[str], tuple[str, ...]], LaunchSpec] | None = None
    starts_here: bool = False
    chooses_nodes: bool = False
    script_nodes: int = 0
    most_nodes: int | None = None
    whole_nodes: bool = False
    forbidden_variables: tuple[str, ...] = ()
    on_path: bool = True
    mpi_fix: str = "check `setup`"
    exit_lines: str = ""
    exit_messages: tuple[tuple[str, ExitReason], ...] = ()
    exit_codes: Mapping[int, ExitReason] = field(default_factory=dict)
    broadcast: tuple[str, ...] = ()


class NodeShare(NamedTuple):
    """Resources that a step requests on each node.

    Parameters
    ----------
    memory_mib : int
        Memory in MiB; 0: all memory of the job on the node.
    """

    gpus: int
    cores: int
    memory_mib: int


def share_of(site: Site, sets: Sequence[ResourceSet]) -> NodeShare:
    """Return the resources to request: whole nodes, or those that belong to the GPUs of one of the sets."""
    if site.launch == NODES:
        return NodeShare(site.gpus_per_node, site.requested_cores, 0)
    gpus = len(sets[0].gpus)
    return NodeShare(
        gpus, gpus * site.cores_per_gpu, gpus * site.memory_per_node // (site.gpus_per_node * MEBIBYTE)
    )


def common_environment(site: Site) -> dict[str, str]:
    """Return the environment of every step: the site's variables, and unbuffered output."""
    return {"PYTHONUNBUFFERED": "1", **site.environment}
