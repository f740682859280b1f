"""The ranks of a batch job, as its driver sees them: groups at work, through the agents of their nodes.

A rank is forked on a GPU when that is first needed, and stays: the next member costs a regrouping, not the
start of a framework. A rank that fails, dies or hangs takes along the other ranks of its group alone; they
are forked again when they are needed. A node that is lost takes along the groups that it has ranks of.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetctl.core.codec import decode, encode
from hetctl.core.plan import Allocation
from hetctl.core.pulse import Pulse
from hetctl.core.site import Node, Site
from hetctl.launchers import LAUNCHERS, node_of_agent
from hetctl.launchers.agents import DRIVER_FILE, Gpu, agent_command, gpus_of
from hetctl.runtime.agent.binding import GPU
from hetctl.runtime.agent.messages import ENDED, FROM, LEAVE, SIGNAL, START, TO, NodeFacts, Welcome
from hetctl.runtime.assignment import Assignment, Stop, Task, write_address
from hetctl.runtime.engagement import EndedGroup, Engagement, Seat
from hetctl.runtime.group import Place
from hetctl.runtime.interfaces import control_address
from hetctl.runtime.steady import say
from hetctl.runtime.steps import StepPool, end_of
from hetctl.runtime.wire import Door, Wire

PATIENCE_S = 900.0
"""A group of which no rank has given a sign of life for so long hangs: it is ended."""
GRACE_S = 3.0
"""So long the ranks of a group that has failed may take to end by themselves, and again when terminated."""
SILENCE_S = 30.0
"""An agent that has sent no heartbeat for so long is lost with its node."""
JOIN_S = 300.0
"""A node whose agent has not connected so long after it was launched is lost."""
WATCH_EVERY_S = 0.5
"""Between two looks for groups that hang, and for agents that are silent."""
KILL_DOUBT_S = 0.05
"""A killed rank may be the first that is seen of the loss of its node, which shows within so long."""
STEP_END_S = 1.0
"""An agent that hangs up may have ended with the whole step, which ends within so long."""
LEAVE_S = 5.0
"""At the end of the job."""
KILLED = 128 + signal.SIGKILL
LOG = "agents.log"
"""Output of the agents and their launcher, and of ranks between members; in the folder of logs."""


@dataclass
class _Agent:
    """The connection to the agent of a node.

    Parameters
    ----------
    lost_at : float
        When it counts as lost, by the monotonic clock, unless it is heard before.
    gone : bool
        True once its connection is broken.
    killed : dict of Gpu to float
        Ranks that were killed, and when they count as lost by themselves, by the same clock.
    """

    node: Node
    wire: Wire
    lost_at: float
    gone: bool = False
    killed: dict[Gpu, float] = field(default_factory=dict)


@dataclass
class _Started:
    """The running step of the agents.

    Parameters
    ----------
    log_start : int
        Length of the log when it was launched.
    join_until : float
        When the agents that have not connected by then are lost, by the monotonic clock.
    agents : dict of str to _Agent
        By node; those that have connected and are not lost.
    """

    log_start: int
    join_until: float
    agents: dict[str, _Agent] = field(default_factory=dict)


class Crew:
    """The ranks of one batch job, and the groups they form.

    Parameters
    ----------
    folder : Path
        For the file by which agents find the driver, and for their log.
    framework : str or None
        Imported once on each node, for all its ranks.
    patience_s : float
        As `PATIENCE_S`.
    """

    def __init__(
        self,
        site: Site,
        nodes: Sequence[Node],
        folder: Path,
        framework: str | None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.nodes = tuple(nodes)
        self._site = site.yielding_to(os.environ)
        self._folder = folder
        self._framework = framework
        self._patience_s = patience_s
        self._steps = StepPool()
        self._started: _Started | None = None
        self._seats: dict[Gpu, Seat] = {}
        self._engaged: dict[str, Engagement] = {}
        self._engaged_on: dict[Gpu, Engagement] = {}
        self._next_watch = 0.0
        self._selector = selectors.DefaultSelector()
        self._door = Door(secrets.token_hex(32), control_address(site.network.control))
        write_address(folder / DRIVER_FILE, self._door.address)

    @property
    def gpus(self) -> int:
        """GPUs on all nodes that are not lost."""
        return sum(len(node.gpus) for node in self.nodes)

    @property
    def busy(self) -> bool:
        """Whether any group is at work."""
        return bool(self._engaged)

    def free_nodes(self) -> tuple[Node, ...]:
        """Return the nodes with the GPUs that no group holds, without full nodes."""
        held = self._engaged_on
        free = (replace(n, gpus=tuple(g for g in n.gpus if (n.name, g) not in held)) for n in self.nodes)
        return tuple(node for node in free if node.gpus)

    def can_hold(self, allocation: Allocation) -> bool:
        """Whether the member is not at work, and nobody holds any of these GPUs."""
        return allocation.member not in self._engaged and self._engaged_on.keys().isdisjoint(
            gpus_of(allocation)
        )

    def engage(self, task: Task, allocation: Allocation) -> None:
        """Let the ranks on an allocation's GPUs form a group and do a task; start those that are not there.

        Raises
        ------
        OSError
            If the agents cannot be started.
        """
        log_start = task.log.stat().st_size if task.log.exists() else 0
        self._start_agents()
        seats = [self._seats.get(gpu) or self._start(gpu) for gpu in gpus_of(allocation)]
        engagement = Engagement(
            task, allocation, seats, secrets.token_hex(32), log_start, time.time(), time.monotonic()
        )
        self._engaged[task.name] = engagement
        self._engaged_on |= dict.fromkeys(gpus_of(allocation), engagement)
        self._tell(engagement)

    def reap(self) -> list[EndedGroup]:
        """Return what the groups have come to that have ended since the last call; their GPUs are free."""
        self._hear_agents()
        self._reap_step()
        due = time.monotonic() >= self._next_watch
        for engagement in self._engaged.values():
            self._tell(engagement)
            if due or engagement.ending is not None:
                self._watch(engagement)
        if due:
            self._next_watch = time.monotonic() + WATCH_EVERY_S
        over = [engagement for engagement in self._engaged.values() if engagement.over]
        for engagement in over:
            del self._engaged[engagement.task.name]
            for gpu in gpus_of(engagement.allocation):
                del self._engaged_on[gpu]
        return [engagement.ended() for engagement in over]

    def stop(self, name: str, reason: str) -> None:
        """Tell the ranks of the group with a task of that name to leave; the first reason stands."""
        engagement = self._engaged.get(name)
        if engagement is None or engagement.stop is not None:
            return
        engagement.stop = reason
        for rank in engagement.told:
            self._pass_on_stop(engagement, engagement.seats[rank])

    def _pass_on_stop(self, engagement: Engagement, seat: Seat) -> None:
        node, gpu = seat.gpu
        if self._started and (agent := self._started.agents.get(node)):
            stop = Stop(engagement.key, engagement.stop or "")
            self._send(agent, {TO: gpu, "message": {"stop": encode(stop)}})

    def pulses(self) -> dict[str, Pulse]:
        """Return the live metrics of the groups that have sent any, by the names of their tasks."""
        return {name: group.pulse for name, group in self._engaged.items() if group.pulse}

    def send_signal(self, number: signal.Signals, name: str) -> None:
        """Send a signal to the ranks of the group with a task of that name."""
        if engagement := self._engaged.get(name):
            self._signal(engagement, number)

    def leave(self) -> None:
        """Let all agents go, and with them their ranks; none outlives this."""
        self._door.close()
        for agent in self._agents():
            self._send(agent, {LEAVE: True})
            self._close(agent)
        if not self._agents():
            self._steps.signal(signal.SIGTERM)
        self._steps.end(LEAVE_S)
        (self._folder / DRIVER_FILE).unlink(missing_ok=True)

    def _close(self, agent: _Agent) -> None:
        if not agent.gone:
            self._selector.unregister(agent.wire)
        agent.wire.close()

    def _agents(self) -> list[_Agent]:
        return list(self._started.agents.values()) if self._started else []

    def _start_agents(self) -> None:
        """Start an agent on each node that is left, unless they are there."""
        if self._started:
            return
        log = self._folder / "logs" / LOG
        command = agent_command(self._folder, self._framework, self._site.cores_per_gpu, sys.executable)
        log_start = log.stat().st_size if log.exists() else 0
        self._steps.launch(LAUNCHERS[self._site.launcher](self._site, self.nodes, command), log)
        self._started = _Started(log_start, time.monotonic() + JOIN_S)

    def _start(self, gpu: Gpu) -> Seat:
        """Let a rank be forked on a GPU, now or when the agent of its node has come."""
        seat = self._seats[gpu] = Seat(gpu)
        node, number = gpu
        assert self._started is not None
        if agent := self._started.agents.get(node):
            self._send(agent, {START: number})
        return seat

    def _hear_agents(self) -> None:
        for facts, wire in self._door.guests():
            self._welcome(facts, wire)
        for key, _ in self._selector.select(0):
            self._hear_agent(key.data)
        self._lose_silent_nodes(time.monotonic())

    def _hear_agent(self, agent: _Agent) -> None:
        now = time.monotonic()
        try:
            for message in agent.wire.arrived():
                agent.lost_at = now + SILENCE_S
                self._hear(agent, message)
        except ConnectionError:
            self._selector.unregister(agent.wire)
            agent.gone = True
            agent.lost_at = min(agent.lost_at, now + STEP_END_S)

    def _lose_silent_nodes(self, now: float) -> None:
        for agent in self._agents():
            if agent.killed and not agent.gone:
                self._lose_killed_ranks(agent, now)
            if now > agent.lost_at:
                self._lose_node(agent.node)
        if self._started and now > self._started.join_until:
            for node in self.nodes:
                if node.name not in self._started.agents:
                    self._lose_node(node)

    def _welcome(self, facts: Any, wire: Wire) -> None:
        """Give an agent its node and let it fork the ranks that wait for it; strangers are sent away."""
        said = decode(NodeFacts, facts)
        nodes = {node.name: node for node in self.nodes}
        name = node_of_agent(tuple(nodes), said.variables, said.host)
        if name is None or self._started is None or name in self._started.agents:
            say(f"an agent on {said.host} {said.variables} is none of the job's: {', '.join(nodes)}")
            wire.close()
            return
        if said.gpus and self._site.device == GPU and len(said.gpus) < len(nodes[name].gpus):
            say(f"{name} shows {len(said.gpus)} GPUs, and the site file says {len(nodes[name].gpus)}")
            wire.close()
            self._lose_node(nodes[name])
            return
        say(f"agent on {name} ({said.host}), {len(said.cores)} cores{_gpu_list(said)}")
        agent = _Agent(nodes[name], wire, time.monotonic() + SILENCE_S)
        self._started.agents[name] = agent
        self._selector.register(wire, selectors.EVENT_READ, agent)
        welcome = Welcome(name, agent.node.gpus, self._site.device, self._site.cores_per_gpu)
        waiting = (seat.gpu[1] for seat in self._seats.values() if seat.gpu[0] == name)
        self._send(agent, encode(welcome), *({START: number} for number in waiting))

    def _send(self, agent: _Agent, *messages: Any) -> None:
        """Send messages; that an agent is gone shows when it is heard."""
        with suppress(ConnectionError):
            for message in messages:
                agent.wire.send(message)

    def _hear(self, agent: _Agent, message: Any) -> None:
        if FROM in message:
            gpu = agent.node.name, message[FROM]
            if seat := self._seats.get(gpu):
                self._hear_rank(seat, message["message"])
        elif ENDED in message:
            self._hear_of_end(agent, (agent.node.name, message[ENDED]), message["exit_code"])

    def _hear_of_end(self, agent: _Agent, gpu: Gpu, exit_code: int) -> None:
        if exit_code == KILLED and gpu in self._engaged_on:
            agent.killed[gpu] = time.monotonic() + KILL_DOUBT_S
        else:
            self._lose_rank(gpu, exit_code)

    def _hear_rank(self, seat: Seat, message: Any) -> None:
        if "ready" in message:
            seat.ready = True
        elif (group := self._engaged_on.get(seat.gpu)) and seat in group.working:
            group.hear(seat, message)

    def _lose_killed_ranks(self, agent: _Agent, now: float) -> None:
        for gpu in [gpu for gpu, due in agent.killed.items() if now >= due]:
            del agent.killed[gpu]
            self._lose_rank(gpu, KILLED)

    def _lose_rank(self, gpu: Gpu, exit_code: int, said: str = "", lost_node: str | None = None) -> None:
        seat = self._seats.pop(gpu, None)
        group = self._engaged_on.get(gpu)
        if seat and group and seat in group.working:
            group.lose(seat, exit_code, said, lost_node)

    def _lose_node(self, node: Node) -> None:
        """Count a node as lost for this job: its groups end, and nothing is placed there any more."""
        assert self._started is not None
        if agent := self._started.agents.pop(node.name, None):
            self._close(agent)
        self.nodes = tuple(other for other in self.nodes if other.name != node.name)
        say(f"the agent on {node.name} is gone, or did not come")
        there = [gpu for gpu in self._seats if gpu[0] == node.name]
        said = end_of(self._folder / "logs" / LOG, self._started.log_start)
        for gpu in there:
            self._lose_rank(gpu, KILLED, said, node.name)

    def _reap_step(self) -> None:
        """Let all groups end when the step of the agents has ended; the next group starts it again."""
        for step in self._steps.reap():
            # What agents said before they ended comes first.
            self._hear_agents()
            for agent in self._agents():
                self._close(agent)
            self._started = None
            for gpu in list(self._seats):
                self._lose_rank(gpu, step.exit_code, step.output)

    def _tell(self, engagement: Engagement) -> None:
        """Give out the assignments that can be: rank 0 says where the others find it."""
        if engagement.ending is not None or len(engagement.told) == len(engagement.seats):
            return
        for rank, seat in enumerate(engagement.seats):
            ready = seat.ready and (rank == 0 or engagement.master is not None)
            agent = self._started and self._started.agents.get(seat.gpu[0])
            if not ready or not agent or rank in engagement.told:
                continue
            master = engagement.master if rank else None
            place = Place(rank, len(engagement.seats), engagement.key, master)
            engagement.told.add(rank)
            assignment = encode(Assignment(engagement.task, place, engagement.engaged_at))
            self._send(agent, {TO: seat.gpu[1], "message": {"task": assignment}})
            if engagement.stop is not None:
                self._pass_on_stop(engagement, seat)

    def _watch(self, engagement: Engagement) -> None:
        """End a group that hangs, and what is left of one that has failed."""
        now = time.monotonic()
        if engagement.ending is None and now - engagement.heard > self._patience_s:
            engagement.hung = True
            engagement.end()
            engagement.ending = now - GRACE_S
        if engagement.ending is None or engagement.over:
            return
        if not engagement.warned and now - engagement.ending >= GRACE_S:
            self._signal(engagement, signal.SIGTERM)
            engagement.warned = True
        elif now - engagement.ending >= 2 * GRACE_S:
            self._signal(engagement, signal.SIGKILL)

    def _signal(self, engagement: Engagement, number: signal.Signals) -> None:
        for seat in engagement.working:
            node, gpu = seat.gpu
            if self._started and (agent := self._started.agents.get(node)):
                self._send(agent, {SIGNAL: int(number), "gpu": gpu})


def _gpu_list(facts: NodeFacts) -> str:
    return "".join(f", GPU {number} {gpu.name} {gpu.uuid}" for number, gpu in enumerate(facts.gpus))
