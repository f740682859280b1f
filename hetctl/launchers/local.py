"""One machine: the agent is a child process of the driver."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.core.errors import InfeasibleError
from hetctl.core.site import Node, Site
from hetctl.launchers.step import AGENTS, NODE_VARIABLE, Step, common_environment


def local(site: Site, nodes: Sequence[Node], command: tuple[str, ...]) -> Step:
    """Start the agent on this machine; it sees the GPUs of the job alone, which may share the machine.

    Raises
    ------
    InfeasibleError
        If the job has several nodes.
    """
    if len(nodes) != 1:
        raise InfeasibleError(
            f"{len(nodes)} nodes; the launcher 'local' has one",
            "Set nodes to 1 in the site file, or choose another launcher.",
        )
    return Step(AGENTS, command, {**common_environment(site), **variables_of(site, nodes[0])})


def variables_of(site: Site, node: Node) -> dict[str, str]:
    """Return the variables that differ from node to node: its name, and the GPUs that the job has there."""
    gpus = {site.visible_devices: ",".join(map(str, node.gpus))} if site.device == "gpu" else {}
    return {NODE_VARIABLE: node.name, **gpus}
