"""The value that every launcher returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetctl.core.site import Node, Site

NODE_VARIABLE = "HETCTL_NODE"
"""Name of the node that an agent is meant for, where launchers give each node variables of its own."""
AGENTS = "agents"


@dataclass(frozen=True)
class Step:
    """A step of a batch job: one command line, which starts a process on each of its nodes.

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


Launcher = Callable[[Site, Sequence[Node], tuple[str, ...]], Step]
"""From the nodes of a job and the agent's command line to the step that starts an agent on each node."""


def common_environment(site: Site) -> dict[str, str]:
    """Return what every step gets: the site's variables, and output that is not held back."""
    return {"PYTHONUNBUFFERED": "1", **site.environment}
