"""Driver's pool of the ranks of a batch job: groups in training, reached through agents.

With ``launch: nodes`` a rank is forked on a GPU when it is first needed, and stays, so that the next member
needs a new group, but no new start of the framework. With ``launch: members`` ranks end with their group. If
a rank fails, dies or hangs, only the other ranks of its group end with it. If a node is lost, the groups with
ranks on it end.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetctl.cluster.launchers.agents import NodeGpu, gpus_of, sets_by_step
from hetctl.model.disk_errors import is_transient
from hetctl.model.ensemble import TrainingCode
from hetctl.model.plan import Placement
from hetctl.model.serialization import decode, encode
from hetctl.model.site import MEMBERS, Node, Site
from hetctl.model.training_progress import LiveMetrics
from hetctl.runtime.agent.messages import Fetched, Overuse, StagedPartitions, StageOrder, StoreOrder
from hetctl.runtime.driver.agent_pool import KILLED, NO_STAGES, SHUTDOWN_S, AgentPool
from hetctl.runtime.driver.running_group import EndedGroup, RankSlot, RunningGroup
from hetctl.runtime.job_logs import length_of
from hetctl.runtime.worker.group import RankInfo
from hetctl.runtime.worker.messages import Assignment, StateSaved, StopMessage, TaskMessage, VisitReport
from hetctl.scheduling.pool import Pool
from hetctl.storage.paths import AgentFiles

WATCH_EVERY_S = 0.5
"""Seconds between two checks for groups that hang."""
NODE_LOSS_DELAY_S = 0.05
"""Seconds to wait after a rank was killed: the loss of its node may be reported later."""
URGENT = frozenset({"ready", "master", "signalled", "visited", "saved", "done"})
"""Keys of messages of ranks on which the driver acts at once."""


@dataclass
class StoreReports:
    """Reports of agents and ranks about states, since they were last taken.

    Parameters
    ----------
    opened : list
        Nodes whose stores are open, with the partitions found there.
    lost : list
        Nodes that have returned without what their stores had.
    fetched : list
        Copies between stores that have ended, with the node of the copy.
    visited, saved : list
        Visits that have ended, and checkpoints that are complete.
    ended : list
        GPUs of ranks that have ended without a task.
    """

    opened: list[tuple[str, frozenset[int]]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    fetched: list[tuple[str, Fetched]] = field(default_factory=list)
    visited: list[VisitReport] = field(default_factory=list)
    saved: list[StateSaved] = field(default_factory=list)
    ended: list[NodeGpu] = field(default_factory=list)


class RankPool:
    """The ranks of one batch job, and the groups they form.

    It receives the reports of its agents (`RankEvents`).

    Parameters
    ----------
    frameworks : sequence of str
        Frameworks that are imported once on each node, for all its ranks.
    shutdown_s : float
        Seconds in which released agents end, as in `AgentPool`.
    stages : mapping of str to StageOrder
        Partitions that nodes copy first, as in `AgentPool`.
    holds_lease : callable
        Same as in `AgentPool`.
    """

    def __init__(
        self,
        site: Site,
        nodes: Sequence[Node],
        files: AgentFiles,
        frameworks: Sequence[str],
        shutdown_s: float = SHUTDOWN_S,
        stages: Mapping[str, StageOrder] = NO_STAGES,
        holds_lease: Callable[[], bool] = lambda: True,
    ) -> None:
        self._timeouts = site.timeouts
        self._agents = AgentPool(site, nodes, files, frameworks, self, shutdown_s, stages, holds_lease)
        self.stores = StoreReports()
        self._slots: dict[NodeGpu, RankSlot] = {}
        self._running: dict[str, RunningGroup] = {}
        self._running_on: dict[NodeGpu, RunningGroup] = {}
        self._killed: dict[NodeGpu, float] = {}
        self._written: dict[str, int] = {}
        self._staged: list[tuple[str, StagedPartitions]] = []
        self._returned: list[str] = []
        self._next_watch = 0.0
        self._is_urgent = False

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes that are not lost."""
        return self._agents.nodes

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
        pool = Pool(self.nodes)
        for running in self._running.values():
            pool.take(running.placement)
        return pool.free

    def start(
        self, task: TaskMessage, placement: tuple[Placement, ...], code: TrainingCode | None = None
    ) -> None:
        """Form a group of the ranks on some GPUs for a task; start ranks that do not run yet.

        Parameters
        ----------
        code : TrainingCode or None
            Code that its ranks load; ranks that have loaded another one are replaced. None: they load none.

        Raises
        ------
        OSError
            If the agents cannot be started.
        """
        log_start = length_of(task.log)
        site = self._agents.site
        sets = sets_by_step(site, self.nodes, task.step_prefix, {task.name: placement})
        own = tuple(sets) if site.launch == MEMBERS else ()
        frameworks = code.preloaded if own and code else None
        for name, held in sets.items():
            self._agents.start_step(name, held, task.log if own else None, frameworks)
        step_on = {each.node: name for name, held in sets.items() for each in held}
        slots = [self._rank_for(gpu, step_on[gpu[0]], code) for gpu in gpus_of(placement)]
        running = RunningGroup(
            *(task, placement, slots, own, secrets.token_hex(32)),
            *(log_start, time.time(), time.monotonic()),
        )
        self._running[task.name] = running
        self._running_on |= dict.fromkeys(gpus_of(placement), running)
        self._assign(running)

    def open_stores(self, order: StoreOrder | None) -> None:
        """Have the agents that start from now on open stores of states; None: have them open none."""
        self._agents.store = order

    def start_agents(self) -> None:
        """Start the agents of all nodes, before the first task.

        Raises
        ------
        OSError
            If they cannot be started.
        """
        for name, held in sets_by_step(self._agents.site, self.nodes, "", {}).items():
            self._agents.start_step(name, held)

    def fetch(self, node: str, name: str, source: str) -> None:
        """Have a state copied from the store of the node `source` to that of `node`."""
        self._agents.fetch(node, name, source)

    def forget(self, names: Sequence[str], nodes: Iterable[str]) -> None:
        """Have states deleted from the stores of nodes."""
        self._agents.forget(names, nodes)

    def reap(self) -> list[EndedGroup]:
        """Return the results of the groups that have ended since the last call; their GPUs are free."""
        self._agents.receive()
        self._record_killed_ranks(time.monotonic())
        due = time.monotonic() >= self._next_watch
        for running in self._running.values():
            self._assign(running)
            if due or running.ending is not None:
                self._watch(running)
        if due:
            self._next_watch = time.monotonic() + WATCH_EVERY_S
        ended: list[EndedGroup] = []
        for running in [running for running in self._running.values() if self._has_ended(running)]:
            try:
                ended.append(running.ended())
            except OSError as error:
                if not is_transient(error):
                    raise
                continue  # Its log says why it has ended: it counts as running until that can be read.
            del self._running[running.task.name]
            for gpu in gpus_of(running.placement):
                del self._running_on[gpu]
        return ended

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until a message or the end of a rank arrives on which `reap` acts."""
        limit, self._is_urgent = time.monotonic() + seconds, False
        while not self._is_urgent and (left := limit - time.monotonic()) > 0:
            self._agents.wait(left)

    def stop(self, name: str, reason: str) -> None:
        """Tell the ranks of the group with a task of that name to stop; the first reason stands."""
        running = self._running.get(name)
        if running is None or running.stop is not None:
            return
        running.stop = reason
        for rank in running.assigned:
            self._send_stop(running, running.slots[rank])

    def live_metrics(self) -> dict[str, LiveMetrics]:
        """Return the last metrics of the groups that have sent any, by the names of their tasks."""
        return {name: group.live_metrics for name, group in self._running.items() if group.live_metrics}

    def note_written(self, name: str, length: int) -> None:
        """Note that the event file of a member has this length in bytes; ranks and driver may write to it."""
        self._written[name] = max(length, self._written.get(name, 0))

    def take_written(self) -> dict[str, int]:
        """Return the lengths, in bytes, of members' event files that have grown since the last call."""
        written, self._written = self._written, {}
        return written

    def take_staged(self) -> list[tuple[str, StagedPartitions]]:
        """Return what nodes have staged since the last call, with their names."""
        staged, self._staged = self._staged, []
        return staged

    def take_returned(self) -> list[str]:
        """Return the nodes that were lost and have returned since the last call."""
        returned, self._returned = self._returned, []
        return returned

    def signalled(self) -> tuple[str, ...]:
        """Return the names of the tasks of groups in which a rank has received SIGTERM."""
        return tuple(name for name, group in self._running.items() if group.signalled)

    def send_signal(self, number: signal.Signals, name: str) -> None:
        """Send a signal to the ranks of the group with a task of that name."""
        if running := self._running.get(name):
            self._signal(running, number)

    def shutdown(self) -> None:
        """Release all agents and end their ranks; all have ended on return."""
        self._agents.shutdown()

    def on_message(self, gpu: NodeGpu, message: Any) -> None:
        """Process a message of a rank."""
        slot, group = self._slots.get(gpu), self._running_on.get(gpu)
        if slot is None:
            return
        # Heartbeats and live metrics need no reaction, and come from all ranks all the time.
        self._is_urgent |= not URGENT.isdisjoint(message)
        if "visited" in message:
            self.stores.visited.append(decode(VisitReport, message["visited"]))
        elif "saved" in message:
            # It may come while the rank works for another member.
            self.stores.saved.append(decode(StateSaved, message["saved"]))
        if slot.awaits_end:
            return
        if "ready" in message:
            slot.ready = True
        elif group and slot in group.working:
            group.on_message(slot, message)
            if "written" in message:
                self.note_written(group.task.name, message["written"])

    def on_end(self, gpu: NodeGpu, exit_code: int, overuse: Overuse | None, node: str) -> None:
        """Record the end of a rank; one that was killed may be the first sign of the loss of its node."""
        self._is_urgent = True
        slot = self._slots.get(gpu)
        if slot and slot.awaits_end:
            slot.awaits_end = False
            self._start_rank(slot)
            return
        group = self._running_on.get(gpu)
        if overuse and group:
            group.note_overuse(overuse, f"the rank on GPU {gpu[1]} of {node}")
        if exit_code == KILLED and group and gpu in self._slots:
            # The loss of an agent kills its ranks, and that of a rank may be reported first.
            self._killed[gpu] = time.monotonic() + NODE_LOSS_DELAY_S
        else:
            self._record_lost_rank(gpu, exit_code)

    def on_staged(self, node: str, staged: StagedPartitions) -> None:
        """Record the end of the stage-in of a node."""
        self._staged.append((node, staged))

    def on_store(self, node: str, partitions: frozenset[int]) -> None:
        """Record the opening of a node's store of states."""
        self._is_urgent = True
        self.stores.opened.append((node, partitions))

    def on_fetched(self, node: str, fetched: Fetched) -> None:
        """Record the end of a copy of a state."""
        self._is_urgent = True
        self.stores.fetched.append((node, fetched))

    def on_return(self, node: str) -> None:
        """Record the return of a lost node."""
        self._returned.append(node)
        self.stores.lost.append(node)

    def on_loss(
        self, step: str, exit_code: int, node: str = "", output: str = "", lost_node: str | None = None
    ) -> None:
        """Record the loss of the ranks of a step, on one of its nodes or on all."""
        of_step = [gpu for gpu, slot in self._slots.items() if slot.step == step]
        for gpu in [gpu for gpu in of_step if node in ("", gpu[0])]:
            self._record_lost_rank(gpu, exit_code, output, lost_node)

    def _rank_for(self, gpu: NodeGpu, step: str, code: TrainingCode | None) -> RankSlot:
        """Return the rank on a GPU, or a new one if there is none, or if it has loaded other code."""
        slot = self._slots.get(gpu)
        if slot is None:
            slot = self._slots[gpu] = RankSlot(gpu, step, code=code)
            self._start_rank(slot)
        elif code and slot.code and slot.code != code:
            slot = self._slots[gpu] = RankSlot(gpu, step, awaits_end=True)
            self._agents.send(step, gpu, {"shutdown": True})
        slot.code = code or slot.code
        return slot

    def _start_rank(self, slot: RankSlot) -> None:
        self._agents.start_rank(slot.step, slot.gpu, slot.code.framework if slot.code else None)

    def _record_lost_rank(
        self, gpu: NodeGpu, exit_code: int, output: str = "", lost_node: str | None = None
    ) -> None:
        self._killed.pop(gpu, None)
        slot, group = self._slots.pop(gpu, None), self._running_on.get(gpu)
        if slot and group and slot in group.working:
            group.record_lost_rank(slot, exit_code, output, lost_node)
        if slot:
            # Also in a group: it may still have written the checkpoint of the member before.
            self.stores.ended.append(gpu)

    def _record_killed_ranks(self, now: float) -> None:
        """Record the loss of ranks killed `NODE_LOSS_DELAY_S` ago whose agents still run."""
        for gpu in [gpu for gpu, due in self._killed.items() if now >= due]:
            slot = self._slots.get(gpu)
            if slot is None or self._agents.serves(slot.step, gpu):
                self._record_lost_rank(gpu, KILLED)

    def _assign(self, running: RunningGroup) -> None:
        """Send assignments to ranks that are ready; the others need the address that rank 0 reports."""
        if running.ending is not None or len(running.assigned) == len(running.slots):
            return
        for rank, slot in enumerate(running.slots):
            if rank in running.assigned or not slot.ready or (rank and running.master is None):
                continue
            master = running.master if rank else None
            spans_nodes = len({placed.node for placed in running.placement}) > 1
            identity = self._agents.identity if spans_nodes else None
            rank_info = RankInfo(rank, len(running.slots), running.key, master, identity)
            running.assigned.add(rank)
            assignment = encode(Assignment(running.task, rank_info, running.started_at, bool(running.steps)))
            self._agents.send(slot.step, slot.gpu, {"task": assignment})
            if running.stop is not None:
                self._send_stop(running, slot)

    def _send_stop(self, running: RunningGroup, slot: RankSlot) -> None:
        stop = StopMessage(running.key, running.stop or "")
        self._agents.send(slot.step, slot.gpu, {"stop": encode(stop)})

    def _watch(self, running: RunningGroup) -> None:
        """Kill a group that hangs, and the rest of one that has failed: these can write no checkpoint."""
        now, ending_s = time.monotonic(), self._timeouts.ending_s
        if running.over:
            return
        if running.ending is None and now - running.last_message_at > self._timeouts.hang_s:
            running.hung = True
            running.end()
            # A hung group does not end by itself: kill it without the time limit for its end.
            running.ending = now - ending_s
        if running.ending is not None and now - running.ending >= ending_s:
            running.killed = not running.hung
            self._signal(running, signal.SIGKILL)

    def _signal(self, running: RunningGroup, number: signal.Signals) -> None:
        for slot in running.working:
            self._agents.signal(slot.step, slot.gpu, number)

    def _has_ended(self, running: RunningGroup) -> bool:
        """Return true if a group and its own steps have ended: only then are its GPUs free."""
        if not running.over:
            return False
        for name in running.steps:
            self._agents.release(name)
        return not any(map(self._agents.runs, running.steps))
