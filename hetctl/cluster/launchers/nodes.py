"""Nodes of a job, as obtained by its driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.cluster.launchers import LAUNCHERS
from hetctl.cluster.launchers.launch_spec import NODE_VARIABLE
from hetctl.model.errors import BatchSystemError
from hetctl.model.job import GIVEN_GPUS
from hetctl.model.site import Site

THIS_MACHINE = "localhost"
"""Node of jobs that run on the machine that submits them."""
BATCH_NODE_VARIABLES = tuple(
    entry.node_variable for entry in BATCH_SYSTEMS.values() if entry.node_variable is not None
)
NODE_VARIABLES = (NODE_VARIABLE, *BATCH_NODE_VARIABLES, "PMIX_HOSTNAME")
"""Variables that may contain the name of the node on which a process runs."""
STEP_DEVICES = tuple(name for entry in BATCH_SYSTEMS.values() for name in entry.device_variables)
"""Variables by which batch systems show which GPUs a step has."""


def nodes_command(site: Site) -> tuple[str, ...] | None:
    """Return the command that lists the nodes inside a job; None if no command is needed."""
    source = BATCH_SYSTEMS[site.batch_system].node_list
    return ("sh", "-c", source.script) if source else None


def parse_nodes(site: Site, environ: Mapping[str, str], output: str) -> tuple[str, ...]:
    """Return the names of a job's nodes, each once and in order.

    Parameters
    ----------
    environ : mapping
        Environment of the driver.
    output : str
        Output of the command from `nodes_command`.

    Raises
    ------
    BatchSystemError
        If this process is not inside a job of the site's batch system, or no node is listed.
    """
    source = BATCH_SYSTEMS[site.batch_system].node_list
    if source is None:
        return (THIS_MACHINE,)
    nodes = tuple(dict.fromkeys(output.split()[LAUNCHERS[site.launcher].script_nodes :]))
    if source.variable not in environ or not nodes:
        raise BatchSystemError(
            f"{source.variable}={environ.get(source.variable)!r} names no nodes",
            f"start the driver inside a job of {site.batch_system}",
        )
    return nodes


def parse_gpus(site: Site, environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the numbers of the GPUs or slots that a job has on each of its nodes.

    A job has all of a node's, except on the machine that submits it, which jobs share.
    """
    given = environ.get(GIVEN_GPUS) if BATCH_SYSTEMS[site.batch_system].runs_here else None
    return tuple(map(int, given.split(","))) if given else tuple(range(site.gpus_per_node))


def node_named(environ: Mapping[str, str]) -> str | None:
    """Return the name of a process's node by the batch system; None if that gives none."""
    return next((environ[name] for name in BATCH_NODE_VARIABLES if environ.get(name)), None)


def node_of_agent(nodes: Sequence[str], environ: Mapping[str, str], host: str) -> str | None:
    """Return the node of an agent by its name in the batch system; None if it is not one of the job's nodes.

    Parameters
    ----------
    environ : mapping
        Environment of the agent.
    host : str
        Name of the agent's machine, with or without a domain.
    """
    # Variables first: nodes that are emulated on one machine share its host name.
    names = [*(environ[variable] for variable in NODE_VARIABLES if variable in environ), host]
    short = {node.partition(".")[0]: node for node in nodes}
    for name in names:
        if name in nodes:
            return name
        if found := short.get(name.partition(".")[0]):
            return found
    return None
