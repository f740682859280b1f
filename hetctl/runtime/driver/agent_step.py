"""A step of agents in a batch job, and the connections to them."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hetctl.cluster.launchers import ResourceSet
from hetctl.cluster.launchers.agents import NodeGpu
from hetctl.model.site import Node
from hetctl.runtime.job_logs import end_of
from hetctl.runtime.transport import Connection

MOST_RETURNS = 3
"""Losses of a node after which it is used again; the next ones would cost its members more than it gains."""


@dataclass
class AgentLink:
    """Connection to an agent.

    Parameters
    ----------
    held : ResourceSet
        Resource set as planned.
    node : str
        Node on which the agent runs.
    lost_at : float
        Time at which it counts as lost, by the monotonic clock; each message moves it.
    closed : bool
        True once the agent has closed its connection.
    """

    held: ResourceSet
    node: str
    connection: Connection
    lost_at: float
    closed: bool = False


@dataclass
class AgentStep:
    """A running step of agents.

    Parameters
    ----------
    sets : dict of str to ResourceSet
        Resource sets by planned node, without those whose agents are lost.
    member : bool
        True if the step belongs to one member and ends with its group.
    log : Path
        File for the output of its agents and their launcher.
    log_start : int
        Length of the log in bytes at the launch.
    join_until : float
        Time by which all agents must connect, by the monotonic clock; the others are lost.
    agents : dict of str to AgentLink
        Agents that have connected and are not lost, by the planned nodes of their sets.
    to_start : dict of NodeGpu to str or None
        GPUs of ranks that are forked when their agents have connected, with their frameworks.
    lost : dict of str to Node
        Nodes that are lost, by name; they are used again when an agent connects from there.
    losses : Counter
        Number of losses of each node.
    released_at : float or None
        Time at which its agents were released, by the same clock; None if they were not.
    """

    sets: dict[str, ResourceSet]
    member: bool
    log: Path
    log_start: int
    join_until: float
    agents: dict[str, AgentLink] = field(default_factory=dict)
    to_start: dict[NodeGpu, str | None] = field(default_factory=dict)
    lost: dict[str, Node] = field(default_factory=dict)
    losses: Counter[str] = field(default_factory=Counter)
    released_at: float | None = None
    signalled: signal.Signals | None = None

    @property
    def output(self) -> str:
        """Output since the launch, of a step of all nodes; empty for a member's, whose log has it."""
        return "" if self.member else end_of(self.log, self.log_start)

    def expects(self, node: str) -> bool:
        """Return true if an agent on that node may connect.

        The step is not released, and the node neither has an agent nor is lost.
        """
        return self.released_at is None and self.agent_on(node) is None and node not in self.lost

    def agent_on(self, node: str) -> AgentLink | None:
        """Return the agent on a node."""
        return next((agent for agent in self.agents.values() if agent.node == node), None)

    def may_return(self, node: str) -> bool:
        """Return true if an agent on a lost node may connect again."""
        return self.released_at is None and node in self.lost and self.losses[node] <= MOST_RETURNS

    def sets_on(self, node: str) -> list[str]:
        """Return the keys of the resource sets on a node, of connected agents or else as planned."""
        where = {key: self.agents[key].node if key in self.agents else key for key in self.sets}
        return [key for key, real in where.items() if real == node]
