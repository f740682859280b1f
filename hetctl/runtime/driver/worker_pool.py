"""The ranks of a batch job as its driver sees them: groups at work, reached through agents.

An agent holds a resource set. With ``launch: nodes`` this is a node for the whole job: a rank is forked on a
GPU when it is first needed, and stays, so that the next member needs a new group, but no new start of the
framework. With ``launch: members`` it is the part of a node that a member has for one round: its step starts
and ends with the group. If a rank fails, dies or hangs, only the other ranks of its group end with it. If a
node is lost, the groups with ranks on it end.
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

from hetctl.cluster.launchers import LAUNCHERS, ResourceSet
from hetctl.cluster.launchers.agents import Gpu, agents_step, gpus_of, sets_by_step
from hetctl.cluster.launchers.nodes import node_of_agent
from hetctl.model.exit_reason import EXIT_CODES, ExitReason
from hetctl.model.plan import Allocation, Placement
from hetctl.model.serialization import decode, encode
from hetctl.model.site import MEMBERS, Node, Site
from hetctl.model.training_progress import Heartbeat
from hetctl.runtime.agent.binding import GPU
from hetctl.runtime.agent.messages import (
    ENDED,
    FROM,
    LEAVE,
    OVERUSE,
    SIGNAL,
    START,
    TO,
    AgentFacts,
    Overuse,
    Welcome,
)
from hetctl.runtime.best_effort_io import log_line
from hetctl.runtime.driver.exit_causes import MISPLACED
from hetctl.runtime.driver.launched_steps import StepPool
from hetctl.runtime.driver.running_task import EndedGroup, RunningTask, WorkerSlot
from hetctl.runtime.interfaces import control_address
from hetctl.runtime.rank_logs import append, end_of
from hetctl.runtime.transport import Connection, Listener
from hetctl.runtime.worker.group import RankInfo
from hetctl.runtime.worker.messages import Assignment, StopMessage, TaskMessage, write_address
from hetctl.storage.paths import AgentFiles

WATCH_EVERY_S = 0.5
"""Seconds between two checks for groups that hang and for agents that are silent."""
KILL_DOUBT_S = 0.05
"""Seconds after a rank was killed in which the loss of its node, of which it may be the first sign, shows."""
STEP_END_S = 1.0
"""Seconds in which a step ends after one of its agents has closed its connection, if it ends with it."""
LEAVE_S = 5.0
"""Seconds in which steps of released agents end; they are terminated then, and killed after twice that."""
PRESSURE = (None, signal.SIGTERM, signal.SIGKILL)
KILLED = 128 + signal.SIGKILL
NEWS = frozenset({"ready", "master", "signalled", "done"})
"""Keys of messages of ranks on which the driver acts at once."""


@dataclass
class _Agent:
    """Connection to an agent.

    Parameters
    ----------
    held : ResourceSet
        Resource set as planned.
    node : str
        Node on which the agent runs.
    lost_at : float
        Time at which it counts as lost, by the monotonic clock; each message moves it.
    gone : bool
        True once its connection is closed.
    killed : dict of Gpu to float
        Ranks that were killed, and the times at which they count as lost by themselves, by the same clock.
    """

    held: ResourceSet
    node: str
    connection: Connection
    lost_at: float
    gone: bool = False
    killed: dict[Gpu, float] = field(default_factory=dict)


@dataclass
class _Started:
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
    agents : dict of str to _Agent
        Agents that have connected and are not lost, by the planned nodes of their sets.
    let_go : float or None
        Time at which its agents were released, by the same clock; None if they were not.
    """

    sets: dict[str, ResourceSet]
    member: bool
    log: Path
    log_start: int
    join_until: float
    agents: dict[str, _Agent] = field(default_factory=dict)
    let_go: float | None = None
    signalled: signal.Signals | None = None

    @property
    def said(self) -> str:
        """Output since the launch, of a step of all nodes; empty for a member's, whose log has it."""
        return "" if self.member else end_of(self.log, self.log_start)

    def expects(self, node: str) -> bool:
        """Return true if an agent on that node may still connect: none has, and the step is not released."""
        return self.let_go is None and all(agent.node != node for agent in self.agents.values())

    def sets_on(self, node: str) -> list[str]:
        """Return the keys of the resource sets on a node, of connected agents or else as planned."""
        where = {key: self.agents[key].node if key in self.agents else key for key in self.sets}
        return [key for key, real in where.items() if real == node]


class WorkerPool:
    """The ranks of one batch job, and the groups they form.

    Parameters
    ----------
    framework : str or None
        Framework that is imported once on each node, for all its ranks.
    """

    def __init__(self, site: Site, nodes: Sequence[Node], files: AgentFiles, framework: str | None) -> None:
        self.nodes = tuple(nodes)
        self._site = site.yielding_to(os.environ)
        self._files = files
        self._framework = framework
        self._timeouts = site.timeouts
        self._steps = StepPool()
        self._started: dict[str, _Started] = {}
        self._seats: dict[Gpu, WorkerSlot] = {}
        self._running: dict[str, RunningTask] = {}
        self._running_on: dict[Gpu, RunningTask] = {}
        self._written: dict[str, int] = {}
        self._next_watch = 0.0
        self._has_news = False
        self._selector = selectors.DefaultSelector()
        self._listener = Listener(secrets.token_hex(32), control_address(site.network.control))
        write_address(files.address, self._listener.address)

    @property
    def gpus(self) -> int:
        """Number of GPUs on all nodes that are not lost."""
        return sum(len(node.gpus) for node in self.nodes)

    @property
    def busy(self) -> bool:
        """True if any group is at work."""
        return bool(self._running)

    def free_nodes(self) -> tuple[Node, ...]:
        """Return the nodes with their free GPUs, without nodes that have none."""
        held = self._running_on
        free = (replace(n, gpus=tuple(g for g in n.gpus if (n.name, g) not in held)) for n in self.nodes)
        return tuple(node for node in free if node.gpus)

    def can_hold(self, allocation: Allocation) -> bool:
        """Return true if the member is not at work, and no group holds any of these GPUs."""
        gpus = gpus_of(allocation.placement)
        return allocation.member not in self._running and self._running_on.keys().isdisjoint(gpus)

    def start(self, task: TaskMessage, placement: tuple[Placement, ...]) -> None:
        """Form a group of the ranks on some GPUs for a task; start ranks that do not run yet.

        Raises
        ------
        OSError
            If the agents cannot be started.
        """
        log_start = _length(task.log)
        sets = sets_by_step(self._site, self.nodes, task.step_prefix, {task.name: placement})
        own = tuple(sets) if self._site.launch == MEMBERS else ()
        for name, held in sets.items():
            self._start_agents(name, held, task.log if name in own else self._files.log)
        step_on = {each.node: name for name, held in sets.items() for each in held}
        seats = [self._seats.get(gpu) or self._start(gpu, step_on[gpu[0]]) for gpu in gpus_of(placement)]
        running = RunningTask(
            *(task, placement, seats, own, secrets.token_hex(32)),
            *(log_start, time.time(), time.monotonic()),
        )
        self._running[task.name] = running
        self._running_on |= dict.fromkeys(gpus_of(placement), running)
        self._tell(running)

    def reap(self) -> list[EndedGroup]:
        """Return the results of the groups that have ended since the last call; their GPUs are free."""
        self._hear_agents()
        self._reap_steps()
        due = time.monotonic() >= self._next_watch
        for running in self._running.values():
            self._tell(running)
            if due or running.ending is not None:
                self._watch(running)
        if due:
            self._next_watch = time.monotonic() + WATCH_EVERY_S
        over = [running for running in self._running.values() if self._has_left(running)]
        for running in over:
            del self._running[running.task.name]
            for gpu in gpus_of(running.placement):
                del self._running_on[gpu]
        return [running.ended() for running in over]

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until a message or the end of a rank arrives on which `reap` acts."""
        limit, self._has_news = time.monotonic() + seconds, False
        while not self._has_news and (left := limit - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                self._hear_agent(key.data)

    def _has_left(self, running: RunningTask) -> bool:
        """Return true if a group and its own steps have ended: only then are its GPUs free."""
        if not running.over:
            return False
        for name in running.steps:
            self._let_go(name)
        return self._started.keys().isdisjoint(running.steps)

    def stop(self, name: str, reason: str) -> None:
        """Tell the ranks of the group with a task of that name to stop; the first reason stands."""
        running = self._running.get(name)
        if running is None or running.stop is not None:
            return
        running.stop = reason
        for rank in running.told:
            self._pass_on_stop(running, running.seats[rank])

    def _pass_on_stop(self, running: RunningTask, seat: WorkerSlot) -> None:
        if agent := self._agent_of(seat):
            stop = StopMessage(running.key, running.stop or "")
            self._send(agent, {TO: seat.gpu[1], "message": {"stop": encode(stop)}})

    def pulses(self) -> dict[str, Heartbeat]:
        """Return the last metrics of the groups that have sent any, by the names of their tasks."""
        return {name: group.pulse for name, group in self._running.items() if group.pulse}

    def take_written(self) -> dict[str, int]:
        """Return the lengths, in bytes, of event files that have grown since the last call, by task."""
        written, self._written = self._written, {}
        return written

    def signalled(self) -> tuple[str, ...]:
        """Return the names of the tasks of groups in which a rank has received SIGTERM."""
        return tuple(name for name, group in self._running.items() if group.signalled)

    def send_signal(self, number: signal.Signals, name: str) -> None:
        """Send a signal to the ranks of the group with a task of that name."""
        if running := self._running.get(name):
            self._signal(running, number)

    def leave(self) -> None:
        """Release all agents and end their ranks; all have ended on return."""
        self._listener.close()
        for name, started in self._started.items():
            self._let_go(name)
            for agent in started.agents.values():
                self._close(agent)
            if not started.agents:
                self._steps.signal(signal.SIGTERM, name)
        self._steps.end(LEAVE_S)
        self._files.address.unlink(missing_ok=True)

    def _close(self, agent: _Agent) -> None:
        if not agent.gone:
            self._selector.unregister(agent.connection)
        agent.connection.close()

    def _agent_of(self, seat: WorkerSlot) -> _Agent | None:
        started = self._started.get(seat.step)
        return started.agents.get(seat.gpu[0]) if started else None

    def _start_agents(self, name: str, sets: Sequence[ResourceSet], log: Path) -> None:
        """Start an agent for each resource set, unless the step already runs."""
        if name in self._started:
            return
        log_start = _length(log)
        step = agents_step(self._site, name, sets, self._files.address, self._framework, sys.executable)
        self._steps.launch(step, log)
        by_node = {each.node: each for each in sets}
        member = self._site.launch == MEMBERS
        join_until = time.monotonic() + self._timeouts.join_s
        self._started[name] = _Started(by_node, member, log, log_start, join_until)

    def _let_go(self, name: str) -> None:
        """Tell the agents of a step to leave; agents that connect later are rejected."""
        started = self._started.get(name)
        if started is None or started.let_go is not None:
            return
        started.let_go = time.monotonic()
        for agent in started.agents.values():
            self._send(agent, {LEAVE: True})

    def _start(self, gpu: Gpu, step: str) -> WorkerSlot:
        """Have a rank forked on a GPU, now or when its agent has connected."""
        seat = self._seats[gpu] = WorkerSlot(gpu, step)
        if agent := self._agent_of(seat):
            self._send(agent, {START: gpu[1]})
        return seat

    def _hear_agents(self) -> None:
        for facts, connection in self._listener.accepted():
            self._welcome(facts, connection)
        for key, _ in self._selector.select(0):
            self._hear_agent(key.data)
        self._watch_agents(time.monotonic())

    def _hear_agent(self, agent: _Agent) -> None:
        now = time.monotonic()
        try:
            for message in agent.connection.arrived():
                agent.lost_at = now + self._timeouts.silence_s
                self._hear(agent, message)
        except ConnectionError:
            self._selector.unregister(agent.connection)
            agent.gone = True
            agent.lost_at = min(agent.lost_at, now + STEP_END_S)

    def _watch_agents(self, now: float) -> None:
        for name, started in list(self._started.items()):
            if started.let_go is not None:
                self._press(name, started, now - started.let_go)
            elif started.member and any(agent.gone for agent in started.agents.values()):
                # The end of the step tells the cause.
                self._let_go(name)
            else:
                self._lose_silent(started, now)
                if now > started.join_until:
                    self._lose_absent(name, started)

    def _press(self, name: str, started: _Started, waited_s: float) -> None:
        """Signal a released step that has not ended: SIGTERM first, then SIGKILL."""
        number = PRESSURE[min(int(waited_s / LEAVE_S), len(PRESSURE) - 1)]
        if number not in (None, started.signalled):
            self._steps.signal(number, name)
            started.signalled = number

    def _lose_silent(self, started: _Started, now: float) -> None:
        for agent in list(started.agents.values()):
            if agent.killed and not agent.gone:
                self._lose_killed_ranks(agent, now)
            if now > agent.lost_at:
                self._lose_node(agent.node)

    def _lose_absent(self, name: str, started: _Started) -> None:
        for node in [node for node in started.sets if node not in started.agents]:
            self._do_without(name, started, node, f"no agent of {name} came from {node}")

    def _welcome(self, facts: Any, connection: Connection) -> None:
        """Send an agent its resource set, and have it fork the ranks that are requested."""
        said = decode(AgentFacts, facts)
        node = node_of_agent([node.name for node in self.nodes], said.variables, said.host)
        started = self._started.get(said.step)
        if node is None or started is None or not started.expects(node):
            names = ", ".join(node.name for node in self.nodes)
            log_line(
                f"an agent of step {said.step} on {said.host} {said.variables} is none of the job's: {names}"
            )
            connection.close()
        elif held := self._set_on(node, started):
            self._seat_agent(held, node, started, said, connection)
        else:
            connection.close()
            words = f"{said.step} was to start on {', '.join(started.sets)}, and started on {node}"
            self._give_up(said.step, started, words)

    def _set_on(self, node: str, started: _Started) -> ResourceSet | None:
        """Return an agent's set on a node; launchers that choose nodes may use any of the same type."""
        free = {name: held for name, held in started.sets.items() if name not in started.agents}
        alike = (name for name in free if self._site.type_of(name) == self._site.type_of(node))
        other = next(alike, "") if LAUNCHERS[self._site.launcher].chooses_nodes else ""
        return free.get(node) or free.get(other)

    def _seat_agent(
        self, held: ResourceSet, node: str, started: _Started, said: AgentFacts, connection: Connection
    ) -> None:
        seen, given = len(said.gpus), len(held.gpus)
        too_many = started.member and seen > given
        if said.gpus and self._site.device == GPU and (seen < given or too_many):
            connection.close()
            words = f"{said.step} sees {seen} GPUs on {node}, and not {given}"
            self._do_without(said.step, started, node, words)
            return
        planned = "" if node == held.node else f", planned on {held.node}"
        where = f"{node} ({said.host}){planned}"
        log_line(f"agent of step {said.step} on {where}, {len(said.cores)} cores{_gpu_list(said)}")
        lost_at = time.monotonic() + self._timeouts.silence_s
        agent = started.agents[held.node] = _Agent(held, node, connection, lost_at)
        self._selector.register(connection, selectors.EVENT_READ, agent)
        site = self._site
        welcome = Welcome(
            *(node, held.gpus, site.device, site.cores_per_gpu, site.memory_per_gpu),
            site.timeouts.orphaned_s,
        )
        waiting = [seat.gpu[1] for seat in self._seats.values() if self._agent_of(seat) is agent]
        self._send(agent, encode(welcome), *({START: number} for number in waiting))

    def _do_without(self, name: str, started: _Started, node: str, words: str) -> None:
        """Continue without an agent: a member's step ends; in a step of all nodes the node is lost."""
        if started.member:
            self._give_up(name, started, words)
        else:
            log_line(words)
            self._lose_node(node)

    def _give_up(self, name: str, started: _Started, words: str) -> None:
        """End the step of a member that was not placed as planned, and its group; log the cause."""
        log_line(f"{MISPLACED}: {words}")
        append(started.log, f"{MISPLACED}: {words}\n")
        self._let_go(name)
        for gpu in [gpu for gpu, seat in self._seats.items() if seat.step == name]:
            self._lose_rank(gpu, EXIT_CODES[ExitReason.PROGRAM_ERROR])

    def _send(self, agent: _Agent, *messages: Any) -> None:
        """Send messages; a closed connection is noticed when it is next read."""
        with suppress(ConnectionError):
            for message in messages:
                agent.connection.send(message)

    def _hear(self, agent: _Agent, message: Any) -> None:
        if FROM in message:
            gpu = agent.held.node, message[FROM]
            if seat := self._seats.get(gpu):
                self._hear_rank(seat, message["message"])
        elif ENDED in message:
            gpu, exit_code = (agent.held.node, message[ENDED]), message["exit_code"]
            if (overuse := message[OVERUSE]) and (group := self._running_on.get(gpu)):
                group.note_overuse(decode(Overuse, overuse), f"the rank on GPU {gpu[1]} of {agent.node}")
            self._hear_of_end(agent, gpu, exit_code)

    def _hear_of_end(self, agent: _Agent, gpu: Gpu, exit_code: int) -> None:
        self._has_news = True
        if exit_code == KILLED and gpu in self._running_on:
            agent.killed[gpu] = time.monotonic() + KILL_DOUBT_S
        else:
            self._lose_rank(gpu, exit_code)

    def _hear_rank(self, seat: WorkerSlot, message: Any) -> None:
        # Signs of life and pulses need no reaction, and come from all ranks all the time.
        self._has_news |= not NEWS.isdisjoint(message)
        if "ready" in message:
            seat.ready = True
        elif (group := self._running_on.get(seat.gpu)) and seat in group.working:
            group.hear(seat, message)
            if "written" in message:
                self._written[group.task.name] = message["written"]

    def _lose_killed_ranks(self, agent: _Agent, now: float) -> None:
        for gpu in [gpu for gpu, due in agent.killed.items() if now >= due]:
            del agent.killed[gpu]
            self._lose_rank(gpu, KILLED)

    def _lose_rank(self, gpu: Gpu, exit_code: int, said: str = "", lost_node: str | None = None) -> None:
        seat = self._seats.pop(gpu, None)
        group = self._running_on.get(gpu)
        if seat and group and seat in group.working:
            group.lose(seat, exit_code, said, lost_node)

    def _lose_node(self, node: str) -> None:
        """Record the loss of a node for this job: its groups end, and nothing is placed on it any more."""
        self.nodes = tuple(other for other in self.nodes if other.name != node)
        log_line(f"the agent on {node} is gone, or did not come")
        for name, started in self._started.items():
            for planned in started.sets_on(node):
                del started.sets[planned]
                if agent := started.agents.pop(planned, None):
                    self._close(agent)
                there = [gpu for gpu, seat in self._seats.items() if (seat.step, gpu[0]) == (name, planned)]
                for gpu in there:
                    self._lose_rank(gpu, KILLED, started.said, node)

    def _reap_steps(self) -> None:
        """End the groups whose step of agents has ended; the next group restarts a step of all nodes."""
        for step in self._steps.reap():
            # Messages that agents sent before they ended come first.
            self._hear_agents()
            started = self._started.pop(step.name)
            for agent in started.agents.values():
                self._close(agent)
            for gpu in [gpu for gpu, seat in self._seats.items() if seat.step == step.name]:
                self._lose_rank(gpu, step.exit_code, started.said)

    def _tell(self, running: RunningTask) -> None:
        """Send assignments to ranks that are ready; the others need the address that rank 0 reports."""
        if running.ending is not None or len(running.told) == len(running.seats):
            return
        for rank, seat in enumerate(running.seats):
            ready = seat.ready and (rank == 0 or running.master is not None)
            agent = self._agent_of(seat)
            if not ready or not agent or rank in running.told:
                continue
            master = running.master if rank else None
            place = RankInfo(rank, len(running.seats), running.key, master)
            running.told.add(rank)
            assignment = encode(Assignment(running.task, place, running.started_at, bool(running.steps)))
            self._send(agent, {TO: seat.gpu[1], "message": {"task": assignment}})
            if running.stop is not None:
                self._pass_on_stop(running, seat)

    def _watch(self, running: RunningTask) -> None:
        """Kill a group that hangs, and the rest of one that has failed: these can write no checkpoint."""
        now, ending_s = time.monotonic(), self._timeouts.ending_s
        if running.over:
            return
        if running.ending is None and now - running.heard > self._timeouts.hang_s:
            running.hung = True
            running.end()
            running.ending = now - ending_s
        if running.ending is not None and now - running.ending >= ending_s:
            running.killed = not running.hung
            self._signal(running, signal.SIGKILL)

    def _signal(self, running: RunningTask, number: signal.Signals) -> None:
        for seat in running.working:
            if agent := self._agent_of(seat):
                self._send(agent, {SIGNAL: int(number), "gpu": seat.gpu[1]})


def _gpu_list(facts: AgentFacts) -> str:
    variables = (f", {name}={value}" for name, value in facts.devices.items())
    gpus = (f", GPU {number} {gpu.name} {gpu.uuid}" for number, gpu in enumerate(facts.gpus))
    return "".join((*variables, *gpus))


def _length(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0
