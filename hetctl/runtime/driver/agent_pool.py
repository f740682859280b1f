"""Driver's pool of a batch job's agents: the steps that start them, and the connections to them.

An agent holds a resource set. With ``launch: nodes`` this is a node for the whole job. With
``launch: members`` it is a member's part of a node for one round: its step starts and ends with the group. A
node is lost if its agent does not connect, ends or falls silent; it returns when an agent connects from
there again.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetctl.cluster.launchers import LAUNCHERS, ResourceSet
from hetctl.cluster.launchers.agents import NodeGpu, agents_step, cancel_command
from hetctl.cluster.launchers.container import PACKAGE, package_link
from hetctl.cluster.launchers.nodes import node_of_agent
from hetctl.model.events import EXIT_CODES, ExitReason
from hetctl.model.hops import StateFetched, StoreOpened
from hetctl.model.serialization import decode, encode
from hetctl.model.site import MEMBERS, Node, Site
from hetctl.model.values import dataclass
from hetctl.runtime.agent.binding import GPU
from hetctl.runtime.agent.joining import DriverAddress
from hetctl.runtime.agent.messages import (
    ENDED,
    ENERGY,
    ENVIRONMENT,
    FETCH,
    FETCHED,
    FORGET,
    FROM,
    OVERUSE,
    REJECTED,
    SHUTDOWN,
    STAGED,
    START,
    STATES,
    AgentAssignment,
    AgentFacts,
    Overuse,
    SourceRequest,
    StagedPartitions,
    StageOrder,
    StoreOrder,
)
from hetctl.runtime.driver.broadcast import BroadcastTree, archive_of, broadcast
from hetctl.runtime.driver.launched_steps import StepPool
from hetctl.runtime.driver.rank_group import MISPLACED
from hetctl.runtime.interfaces import control_address
from hetctl.runtime.job_logs import append, end_of, length_of, log_line
from hetctl.runtime.transport import Connection, JobIdentity, Listener
from hetctl.runtime.worker.messages import write_address
from hetctl.runtime.worker.scripts.warm_start import WarmPython
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.paths import AgentFiles
from hetctl.storage.patience import PATIENT

if TYPE_CHECKING:
    from hetctl.runtime.driver.rank_pool import RankPool

STEP_END_S = 1.0
"""Seconds that a step takes to end after an agent's closed connection, if it ends with the agent."""
SHUTDOWN_S = 5.0
END_SIGNALS = (None, signal.SIGTERM, signal.SIGKILL)
"""Signals to a step after its release, one per `shutdown_s`."""
KILLED = 128 + signal.SIGKILL
TOUCH_EVERY_S = 2.0
"""Seconds between two touches of the driver's file, and two heartbeats, which tell agents that it runs."""
LAST_NODE_RETURN_S = 10.0
"""Seconds in which the last node's agent may return, or end its step, after it closed its connection."""
MOST_RETURNS = 3
"""Most losses after which a node is used again; more would cost its members more than the node gains."""


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
        Time at which it counts as lost, by the monotonic clock; each message delays it.
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
        True if the step serves one member and ends with its group.
    log : Path
        File for the output of agents and launcher.
    log_start : int
        Length of the log at the launch in bytes.
    join_until : float
        Time by which agents must connect, by the monotonic clock; the others are lost.
    agents : dict of str to AgentLink
        Connected agents that are not lost, by the planned nodes of their sets.
    to_start : dict of NodeGpu to str or None
        GPUs, with frameworks, of ranks to fork once their agents have connected.
    lost : dict of str to Node
        Lost nodes by name; a node is used again when an agent connects from there.
    losses : Counter
        Number of losses of each node.
    released_at : float or None
        Time of its agents' release, by the monotonic clock; None before.
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
    def output(self) -> str | None:
        """Output since the launch of a step of all nodes; empty for a member's step, whose log has it.

        None while the disk does not answer.
        """
        return "" if self.member else end_of(self.log, self.log_start)

    def expects(self, node: str) -> bool:
        """Return true if the step is not released, and the node has no agent and is not lost."""
        return self.released_at is None and self.agent_on(node) is None and node not in self.lost

    def agent_on(self, node: str) -> AgentLink | None:
        """Return the agent on a node."""
        return next((agent for agent in self.agents.values() if agent.node == node), None)


class AgentPool:
    """Agents of one batch job, which start its ranks and pass on messages.

    Attributes
    ----------
    nodes : tuple of Node
        Nodes of the job that are not lost.
    identity : JobIdentity or None
        Identity of the job; None if all its agents are on this machine.
    store : StoreOrder or None
        Store of states for agents that connect from now on to open; None: they open none.

    Parameters
    ----------
    frameworks : sequence of str
        Frameworks that a whole node's agent imports once for all its ranks.
    ranks : RankPool
        Receiver of agents' reports about their ranks, called in `receive` and `wait`.
    shutdown_s : float
        Seconds until a step of released agents is terminated; it is killed after twice that.
    stages : mapping of str to StageOrder
        Partitions, by node, that the agent copies before it forks ranks.
    holds_lease : callable
        Function that returns true if the driver has just renewed its lease; only then agents get heartbeats.
    pythons : sequence of WarmPython
        Pythons that a whole node's agent starts before all else.
    """

    def __init__(
        self,
        site: Site,
        nodes: Sequence[Node],
        files: AgentFiles,
        frameworks: Sequence[str],
        ranks: RankPool,
        shutdown_s: float = SHUTDOWN_S,
        stages: Mapping[str, StageOrder] | None = None,
        holds_lease: Callable[[], bool] = lambda: True,
        pythons: Sequence[WarmPython] = (),
    ) -> None:
        self._holds_lease = holds_lease
        self.nodes = tuple(nodes)
        self.store: StoreOrder | None = None
        self._stages = stages or {}
        self._stores: dict[str, Any] = {}
        # Keep variables of NCCL, RCCL, Gloo and libfabric from the user's shell or a module.
        self.site = site.with_overrides(os.environ)
        self._files = files
        if site.container:
            PATIENT.call(link_package, files.address.parent)
        self._frameworks = frameworks
        self._ranks = ranks
        self._timeouts = site.timeouts
        self._shutdown_s = shutdown_s
        self._steps = StepPool()
        self._ended: dict[str, int] = {}
        self._running: dict[str, AgentStep] = {}
        self._selector = selectors.DefaultSelector()
        self.identity = None
        if not LAUNCHERS[site.launcher].starts_here:
            from hetctl.runtime.tls import new_certificate

            self.identity = JobIdentity(new_certificate(), site.network.encrypt_data)
        self._listener = Listener(secrets.token_hex(32), control_address(site.network.control), self.identity)
        address = DriverAddress(
            **vars(self._listener.address),
            identity=self.identity,
            orphaned_s=self._timeouts.orphaned_s,
            cancel=cancel_command(site, os.environ),
            pythons=() if site.launch == MEMBERS else tuple(pythons),
            environment=archive_of(site, files.address.parent),
        )
        self._tree = BroadcastTree(len(self.nodes))
        if address.environment:
            broadcast(address.environment, LAUNCHERS[site.launcher], self._timeouts.join_s)
        PATIENT.call(write_address, files.address, address)
        self._next_touch = 0.0

    def start_step(
        self,
        name: str,
        sets: Sequence[ResourceSet],
        log: Path | None = None,
        frameworks: Sequence[str] | None = None,
    ) -> None:
        """Start an agent for each resource set, unless the step already runs.

        Parameters
        ----------
        log : Path or None
            File for the agents' output; None: the file that the job's agents share.
        frameworks : sequence of str or None
            Frameworks that these agents import; None: those of the job.

        Raises
        ------
        OSError
            If the agents cannot be started.
        """
        if name in self._running:
            return
        log = log or self._files.log
        log_start = length_of(log)
        frameworks = self._frameworks if frameworks is None else frameworks
        step = agents_step(self.site, name, sets, self._files.address, frameworks, sys.executable)
        self._steps.launch(step, log)
        by_node = {each.node: each for each in sets}
        member = self.site.launch == MEMBERS
        join_until = time.monotonic() + self._timeouts.join_s
        self._running[name] = AgentStep(by_node, member, log, log_start, join_until)

    def release(self, name: str) -> None:
        """Tell a step's agents to leave; reject agents that connect later."""
        step = self._running.get(name)
        if step is None or step.released_at is not None:
            return
        step.released_at = time.monotonic()
        for agent in step.agents.values():
            _send(agent.connection, {SHUTDOWN: True})

    def runs(self, name: str) -> bool:
        """Return true if a step of that name is not known to have ended."""
        return name in self._running

    def start_rank(self, step: str, gpu: NodeGpu, framework: str | None) -> None:
        """Have a rank forked on a GPU, now or when its agent connects.

        Parameters
        ----------
        framework : str or None
            Framework that the rank loads; None for none.
        """
        if agent := self._agent_of(step, gpu):
            _send(agent.connection, {START: framework, "gpu": gpu[1]})
        elif step in self._running:
            self._running[step].to_start[gpu] = framework

    def serves(self, step: str, gpu: NodeGpu) -> bool:
        """Return true if a rank's agent is connected, and its step is not released."""
        agent = self._agent_of(step, gpu)
        return agent is not None and not agent.closed and self._running[step].released_at is None

    def send(self, step: str, gpu: NodeGpu, key: str, value: Any) -> None:
        """Send a rank a message or signal; the loss of its agent is reported as an event."""
        if agent := self._agent_of(step, gpu):
            _send(agent.connection, {key: value, "gpu": gpu[1]})

    def fetch(self, node: str, name: str, source: str) -> None:
        """Have a node's agent copy a state from another node; report a failure if either is lost."""
        agent, address = self._agent_on(node), self._stores.get(source)
        if agent and address:
            _send(agent.connection, {FETCH: name, "address": address})
        else:
            self._ranks.report(StateFetched(node, name, error=f"{node} or {source} is lost"))

    def forget(self, names: Sequence[str], nodes: Iterable[str]) -> None:
        """Have the agents of nodes delete states; a lost node's states are gone."""
        for agent in filter(None, map(self._agent_on, nodes)):
            _send(agent.connection, {FORGET: list(names)})

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for messages of connected agents, and process them."""
        for key, _ in self._selector.select(seconds):
            self._receive_from(key.data)

    def receive(self) -> None:
        """Process messages, ended steps, and silent or absent agents.

        A step of all nodes may start again after its end; its nodes are not lost.
        """
        self._touch()
        self._read()
        self._ended.update(self._steps.reap())
        for name, exit_code in list(self._ended.items()):
            # First the messages that agents sent before they ended.
            self._read()
            # The log tells why the step has ended: it counts as running until the log can be read.
            if (output := self._running[name].output) is None:
                continue
            del self._ended[name]
            for agent in self._running.pop(name).agents.values():
                self._close(agent)
                self._stores.pop(agent.node, None)
            self._ranks.on_loss(name, exit_code, output=output)
        # After ended steps: an agent that ended with its step must not cost the node, since the step starts
        # again.
        self._watch_steps(time.monotonic())

    def shutdown(self) -> None:
        """Release all agents and end their ranks; all have ended on return."""
        self._listener.close()
        for name, step in self._running.items():
            self.release(name)
            for agent in step.agents.values():
                self._close(agent)
            # No message reaches agents that have not connected.
            if not step.agents:
                self._steps.signal(signal.SIGTERM, name)
        # Agents that try to return thus see the driver's end.
        with suppress(OSError):
            self._files.address.unlink(missing_ok=True)
        self._steps.end(self._shutdown_s)

    def _touch(self) -> None:
        now = time.monotonic()
        if now >= self._next_touch:
            self._next_touch = now + TOUCH_EVERY_S
            with suppress(OSError):
                os.utime(self._files.address)
            if self._holds_lease():
                for step in self._running.values():
                    for agent in step.agents.values():
                        _send(agent.connection, {})

    def _read(self) -> None:
        for facts, connection in self._listener.accepted():
            if ENVIRONMENT in facts:
                source = self._tree.source_for(decode(SourceRequest, facts[ENVIRONMENT]))
                _close_after(connection, {ENVIRONMENT: source and encode(source)})
            else:
                self._answer_join(facts, connection)
        self.wait(0)

    def _agent_of(self, step: str, gpu: NodeGpu) -> AgentLink | None:
        running = self._running.get(step)
        return running.agents.get(gpu[0]) if running else None

    def _agent_on(self, node: str) -> AgentLink | None:
        agents = (step.agent_on(node) for step in self._running.values())
        return next(filter(None, agents), None)

    def _close(self, agent: AgentLink) -> None:
        if not agent.closed:
            self._selector.unregister(agent.connection)
        agent.connection.close()

    def _receive_from(self, agent: AgentLink) -> None:
        now = time.monotonic()
        try:
            for message in agent.connection.arrived():
                agent.lost_at = now + self._timeouts.silence_s
                self._pass_on(agent, message)
        except ConnectionError:
            self._selector.unregister(agent.connection)
            agent.closed = True
            # If the whole step ends now, it starts again; the node is lost only if the step goes on without
            # it.
            agents = (one for step in self._running.values() for one in step.agents.values())
            patience_s = STEP_END_S if any(not one.closed for one in agents) else LAST_NODE_RETURN_S
            agent.lost_at = min(agent.lost_at, now + patience_s)

    def _pass_on(self, agent: AgentLink, message: Any) -> None:
        if FROM in message:
            self._ranks.on_message((agent.held.node, message["gpu"]), message[FROM])
        elif ENDED in message:
            gpu = agent.held.node, message["gpu"]
            overuse = message[OVERUSE] and decode(Overuse, message[OVERUSE])
            self._ranks.on_end(gpu, message[ENDED], overuse, agent.node)
        elif ENERGY in message:
            self._ranks.on_energy({(agent.held.node, gpu): joules for gpu, joules in message[ENERGY]})
        elif STAGED in message:
            self._ranks.staged.append(decode(StagedPartitions, message[STAGED]))
        elif STATES in message:
            self._stores[agent.node] = message[STATES]
            self._ranks.report(StoreOpened(agent.node, frozenset(message["partitions"])))
        elif FETCHED in message:
            self._ranks.report(decode(StateFetched, message[FETCHED]))

    def _watch_steps(self, now: float) -> None:
        for name, step in list(self._running.items()):
            if step.released_at is not None:
                due = int((now - step.released_at) / self._shutdown_s)
                number = END_SIGNALS[min(due, len(END_SIGNALS) - 1)]
                if number not in (None, step.signalled):
                    self._steps.signal(number, name)
                    step.signalled = number
            elif step.member and any(agent.closed for agent in step.agents.values()):
                # The end of the step gives the reason.
                self.release(name)
            else:
                for agent in [agent for agent in step.agents.values() if now > agent.lost_at]:
                    self._mark_node_lost(agent.node)
                absent = [node for node in step.sets if node not in step.agents]
                for node in absent if now > step.join_until else ():
                    # A slow start must not cost the node for the whole job: its agent may connect late.
                    self._continue_without(name, step, node, f"no agent of {name} connected from {node}")

    def _answer_join(self, facts: Any, connection: Connection) -> None:
        """Send an agent its resource set, and have it fork the requested ranks."""
        found = decode(AgentFacts, facts)
        step = self._running.get(found.step)
        known = (*self.nodes, *(step.lost.values() if step else ()))
        node = node_of_agent([node.name for node in known], found.variables, found.host)
        if node and step and not step.member:
            self._take_back(node, step)
        if node is None or step is None or not step.expects(node):
            names = ", ".join(node.name for node in self.nodes)
            log_line(
                f"agent of step {found.step} on {found.host} {found.variables} rejected: "
                f"not on a node of the job ({names}), or not expected there"
            )
            # For good, unless the node's last agent may still run.
            _close_after(connection, *([] if node and step and step.agent_on(node) else [{SHUTDOWN: True}]))
        elif held := self._set_for(node, step):
            self._admit(held, node, step, found, connection)
        else:
            reason = f"step {found.step} was to start on {', '.join(step.sets)}, and started on {node}"
            _close_after(connection, {REJECTED: reason})
            self._fail_member(found.step, step, reason)

    def _take_back(self, name: str, step: AgentStep) -> None:
        """Use a node again after it was lost or its last agent ended."""
        last = step.agent_on(name)
        if last and last.closed:
            self._mark_node_lost(name)
        if step.released_at is None and name in step.lost and step.losses[name] <= MOST_RETURNS:
            node = step.lost.pop(name)
            self.nodes = (*self.nodes, node)
            step.sets[name] = ResourceSet(name, node.gpus)
            self._ranks.on_return(name)

    def _set_for(self, node: str, step: AgentStep) -> ResourceSet | None:
        """Return an agent's set on a node; launchers that choose nodes may use any node of the same type."""
        free = {name: held for name, held in step.sets.items() if name not in step.agents}
        same_type = (name for name in free if self.site.type_of(name) == self.site.type_of(node))
        other = next(same_type, "") if LAUNCHERS[self.site.launcher].chooses_nodes else ""
        return free.get(node) or free.get(other)

    def _admit(
        self, held: ResourceSet, node: str, step: AgentStep, found: AgentFacts, connection: Connection
    ) -> None:
        seen, given = len(found.gpus), len(held.gpus)
        # A job's last node may have GPUs that the run does not use; a member's step must see its own GPUs
        # alone.
        too_many = step.member and seen > given
        if found.gpus and self.site.device == GPU and (seen < given or too_many):
            reason = f"step {found.step} sees {seen} GPUs on {node}, and not {given}"
            _close_after(connection, {REJECTED: reason})
            self._continue_without(found.step, step, node, reason)
            return
        planned = "" if node == held.node else f", planned on {held.node}"
        where = f"{node} ({found.host}){planned}"
        facts = [f"{len(found.cores)} cores", *(f"{name}={value}" for name, value in found.devices.items())]
        facts += [f"GPU {number} {gpu.name} {gpu.uuid}" for number, gpu in enumerate(found.gpus)]
        log_line(f"agent of step {found.step} on {where}, {', '.join(facts)}")
        lost_at = time.monotonic() + self._timeouts.silence_s
        agent = step.agents[held.node] = AgentLink(held, node, connection, lost_at)
        self._selector.register(connection, selectors.EVENT_READ, agent)
        site = self.site
        assignment = AgentAssignment(
            *(node, held.gpus, site.device, site.cores_per_gpu, site.memory_per_gpu),
            *(site.timeouts.silence_s, self._stages.get(node), self.store, site.timeouts.lease_s),
            gpus_of_node=site.gpus_per_node,
            gpu_cores=site.gpu_cores,
        )
        own = [gpu for gpu in step.to_start if gpu[0] == held.node]
        orders = [{START: step.to_start.pop(gpu), "gpu": gpu[1]} for gpu in own]
        _send(agent.connection, encode(assignment), *orders)

    def _continue_without(self, name: str, step: AgentStep, node: str, reason: str) -> None:
        """Continue without an agent: end a member's step, or drop the node from a step of all nodes."""
        if step.member:
            self._fail_member(name, step, reason)
        else:
            # The agent would log it, but its job may end earlier if this was the last node.
            _log_to_step(step, reason)
            self._mark_node_lost(node)

    def _fail_member(self, name: str, step: AgentStep, reason: str) -> None:
        """End a misplaced member's step and group, and log the reason."""
        _log_to_step(step, f"{MISPLACED}: {reason}")
        self.release(name)
        # These words in the log make the step count as not launched, not as a failure of the member.
        self._ranks.on_loss(name, EXIT_CODES[ExitReason.PROGRAM_ERROR])

    def _mark_node_lost(self, node: str) -> None:
        """Record the loss of a node: its groups end, and nothing is placed on it until it returns."""
        lost = {other.name: other for other in self.nodes if other.name == node}
        self.nodes = tuple(other for other in self.nodes if other.name != node)
        self._stores.pop(node, None)
        log_line(f"node {node} is lost: its agent has ended, sends nothing, or did not connect")
        for name, step in self._running.items():
            if not step.member:
                step.lost |= lost
                step.losses[node] += 1
            # Those of connected agents, or else as planned.
            where = {key: step.agents[key].node if key in step.agents else key for key in step.sets}
            for planned in [key for key, real in where.items() if real == node]:
                del step.sets[planned]
                if agent := step.agents.pop(planned, None):
                    self._close(agent)
                self._ranks.on_loss(name, KILLED, planned, step.output or "", node)


def _send(connection: Connection, *messages: Any) -> None:
    """Send messages; the next reading notices a closed connection."""
    with suppress(ConnectionError):
        for message in messages:
            connection.send(message)


def _close_after(connection: Connection, *messages: Any) -> None:
    """Close an agent's connection after the messages; one with a reason is for the agent's log."""
    _send(connection, *messages)
    connection.close()


def _log_to_step(step: AgentStep, line: str) -> None:
    log_line(line)
    # A full disk ends the job in order.
    with suppress(OSError):
        append(step.log, f"{line}\n")


def link_package(folder: Path) -> None:
    """Make `package_link`, before agents start; OSError if the file system does not answer."""
    link = package_link(folder)
    make_private_folder(link.parent)
    with suppress(FileExistsError):
        link.symlink_to(PACKAGE)
        return
    # Of an earlier job, before another version was installed.
    if link.readlink() != PACKAGE:
        link.unlink()
        link.symlink_to(PACKAGE)
