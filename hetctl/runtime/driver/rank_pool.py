"""Driver's pool of a batch job's ranks: groups in training, reached through agents.

With ``launch: nodes`` a rank is forked when its GPU is first needed, and stays: the next member needs a new
group, but does not start the framework again. With ``launch: members`` ranks end with their group. A rank
that fails, dies or hangs ends only its own group. A lost node ends all groups with ranks on it.
"""

from __future__ import annotations

import math
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from hetctl.cluster.launchers.agents import NodeGpu, gpus_of, sets_by_step
from hetctl.model.ensemble import TrainingCode
from hetctl.model.hops import RankEnded, StateSaved, StoreLost, VisitEnd, worker_named
from hetctl.model.plan import FUSED, Placement
from hetctl.model.serialization import decode, encode
from hetctl.model.site import MEMBERS, Node, Site
from hetctl.model.training_progress import LiveMetrics
from hetctl.runtime.agent.messages import SIGNAL, TO, Overuse, StagedPartitions, StageOrder
from hetctl.runtime.driver.agent_pool import KILLED, SHUTDOWN_S, AgentPool
from hetctl.runtime.driver.rank_group import RankGroup, RankSlot
from hetctl.runtime.job_logs import length_of
from hetctl.runtime.worker.group import RankInfo
from hetctl.runtime.worker.messages import (
    RANK_SIGNALS,
    Assignment,
    TaskMessage,
)
from hetctl.runtime.worker.scripts.warm_start import WarmPython
from hetctl.scheduling.pool import Pool
from hetctl.storage.paths import AgentFiles

WATCH_EVERY_S = 0.5
"""Seconds between two checks for groups that hang."""
NODE_LOSS_DELAY_S = 0.05
"""Seconds to wait after a rank was killed, for a report of the loss of its node."""
URGENT = frozenset({"ready", "master", "signalled", "visited", "saved", "done"})
"""Keys of ranks' messages on which the driver acts at once."""


class RankPool:
    """Ranks of one batch job, and the groups they form.

    Its agents report to `on_message` and the like; they name GPUs by planned nodes.

    Attributes
    ----------
    agents : AgentPool
        Agents of the job, which reach its ranks.
    reports : list
        Events about visits and states (`hetctl.model.hops`), in order of arrival.
    staged : list of StagedPartitions
        Results of staging on nodes; the reader empties this list and the others.
    returned : list of str
        Lost nodes that are used again.

    Parameters
    ----------
    frameworks : sequence of str
        Frameworks that each node imports once for all its ranks.
    shutdown_s, stages, holds_lease, pythons
        Same as in `AgentPool`.
    grace_s : float
        Seconds in which a group has to end after it was told to stop.
    """

    def __init__(
        self,
        site: Site,
        nodes: Sequence[Node],
        files: AgentFiles,
        frameworks: Sequence[str],
        shutdown_s: float = SHUTDOWN_S,
        stages: Mapping[str, StageOrder] | None = None,
        holds_lease: Callable[[], bool] = lambda: True,
        grace_s: float = math.inf,
        pythons: Sequence[WarmPython] = (),
    ) -> None:
        self._timeouts, self._grace_s = site.timeouts, grace_s
        self.agents = AgentPool(
            *(site, nodes, files, frameworks, self, shutdown_s, stages, holds_lease, pythons)
        )
        self.reports: list[Any] = []
        self._slots: dict[NodeGpu, RankSlot] = {}
        self._running: dict[str, RankGroup] = {}
        self._killed: dict[NodeGpu, float] = {}
        self._written: dict[str, int] = {}
        self.staged: list[StagedPartitions] = []
        self.returned: list[str] = []
        self._energy_j: dict[NodeGpu, float] = {}
        """Energy of GPUs or slots since their present agent began."""
        self._next_watch = 0.0
        self._divided_at, self._has_seats = time.monotonic(), False
        self._is_urgent = False

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes of the job that are not lost."""
        return self.agents.nodes

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
        self,
        task: TaskMessage,
        placement: tuple[Placement, ...],
        code: TrainingCode | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """Form a group on some GPUs for a task; start ranks that do not run yet.

        Parameters
        ----------
        code : TrainingCode or None
            Code that its ranks load; None for none. Ranks that have loaded other code are replaced.
        alone : bool
            True if it shares no GPU: then ranks that wait in other seats end first, each of which has some
            of the GPU's memory, or the only place on it.

        Raises
        ------
        OSError
            If the agents cannot be started.
        """
        log_start = length_of(task.log)
        site = self.agents.site
        sets = sets_by_step(site, self.nodes, task.step_prefix, {task.name: placement})
        own = tuple(sets) if site.launch == MEMBERS else ()
        frameworks = code.preloaded if own and code else None
        for name, held in sets.items():
            self.agents.start_step(name, held, task.log if own else None, frameworks)
        step_on = {each.node: name for name, held in sets.items() for each in held}
        gpus = gpus_of(placement, site.gpus_per_node)
        if alone and self._has_seats:
            self._end_idle(set(gpus))
        host = self._host_of(gpus[0]) if task.kind == FUSED else None
        slots = [host] if host else [self._rank_for(gpu, step_on[gpu[0]], code) for gpu in gpus]
        running = self._running[task.name] = RankGroup(
            *(task, placement, slots, own, secrets.token_hex(32)),
            *(log_start, time.time(), time.monotonic()),
        )
        self._divide_time()
        self._has_seats |= any(part.seat for part in placement)
        for slot in slots:
            slot.groups.append(running)
        if placement[0].seat:
            for group in next(groups for groups in self._groups_by_gpu().values() if running in groups):
                if group is not running:
                    self._tell(group, {"joined": group.key})
        self._assign(running)

    def start_agents(self) -> None:
        """Start the agents of all nodes, before the first task.

        Raises
        ------
        OSError
            If they cannot be started.
        """
        for name, held in sets_by_step(self.agents.site, self.nodes, "", {}).items():
            self.agents.start_step(name, held)

    def reap(self) -> list[RankGroup]:
        """Return the groups that have ended since the last call, and free their GPUs."""
        self.agents.receive()
        self._record_killed_ranks(time.monotonic())
        self._divide_time()
        due = time.monotonic() >= self._next_watch
        for running in self._running.values():
            self._assign(running)
            if due or running.ending is not None or running.stop is not None:
                self._watch(running)
        if due:
            self._next_watch = time.monotonic() + WATCH_EVERY_S
        ended = []
        for group in [group for group in self._running.values() if group.over]:
            # Its GPUs are free once its own steps have ended, too.
            for name in group.steps:
                self.agents.release(name)
            if not any(map(self.agents.runs, group.steps)) and group.complete():
                ended.append(group)
        for group in ended:
            del self._running[group.name]
            for slot in group.slots:
                slot.groups.remove(group)
        return ended

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until an urgent message or the end of a rank arrives."""
        limit, self._is_urgent = time.monotonic() + seconds, False
        while not self._is_urgent and (left := limit - time.monotonic()) > 0:
            self.agents.wait(left)

    def stop(self, name: str, reason: str, busy_s: float = 0.0) -> None:
        """Tell the ranks of a task's group to stop; the first reason stands.

        Parameters
        ----------
        busy_s : float
            Seconds for which they may be too busy to notice.
        """
        running = self._running.get(name)
        if running is None:
            return
        running.stopping_since = min(time.monotonic() + busy_s, running.stopping_since)
        if running.stop is None:
            running.stop = reason
            self._tell(running, {"stop": running.key, "reason": reason})

    def live_metrics(self) -> dict[str, LiveMetrics]:
        """Return the last metrics of groups that have sent any, by task name."""
        return {name: group.live_metrics for name, group in self._running.items() if group.live_metrics}

    def note_written(self, name: str, length: int) -> None:
        """Note the length in bytes of a member's event file, which ranks and driver may write."""
        self._written[name] = max(length, self._written.get(name, 0))

    def take_written(self) -> dict[str, int]:
        """Return the lengths in bytes of members' event files that have grown since the last call."""
        written, self._written = self._written, {}
        return written

    def signalled(self) -> tuple[str, ...]:
        """Return the tasks of groups in which a rank has received SIGTERM."""
        return tuple(name for name, group in self._running.items() if group.signalled)

    def shutdown(self) -> None:
        """Release all agents and end their ranks; all have ended on return."""
        self.agents.shutdown()

    def on_message(self, gpu: NodeGpu, message: Any) -> None:
        """Process a message of a rank."""
        slot = self._slots.get(gpu)
        if slot is None:
            return
        # Heartbeats and live metrics, which all ranks send all the time, need no reaction.
        self._is_urgent |= not URGENT.isdisjoint(message)
        if "visited" in message:
            self.reports.append(decode(VisitEnd, message["visited"]))
        elif "saved" in message:
            # It may come while the rank works for another member.
            self.reports.append(decode(StateSaved, message["saved"]))
        if slot.awaits_end:
            return
        if "ready" in message:
            slot.ready = True
        for group in [] if "ready" in message else [one for one in slot.groups if slot in one.working]:
            # Fused members are one process: a message of one of them shows that none hangs.
            group.last_message_at = time.monotonic()
            if message.get("member", group.name) == group.name:
                group.on_message(slot, message)
                if "written" in message:
                    self.note_written(group.name, message["written"])

    def on_energy(self, used_j: Mapping[NodeGpu, float]) -> None:
        """Add the joules that GPUs or slots have used since the last message to the groups there."""
        at_work = self._groups_by_gpu()
        for gpu, joules in used_j.items():
            before_j, groups = self._energy_j.get(gpu, 0.0), at_work.get(gpu, [])
            self._energy_j[gpu] = joules
            # A new agent counts from 0.
            more_j = joules - before_j if joules >= before_j else joules
            for group in groups:
                group.energy_j = (group.energy_j or 0.0) + more_j / len(groups)

    def on_end(self, gpu: NodeGpu, exit_code: int, overuse: Overuse | None, node: str) -> None:
        """Record the end of a rank; a killed rank may be the first sign of the loss of its node."""
        self._is_urgent = True
        slot = self._slots.get(gpu)
        if slot and slot.awaits_end:
            slot.awaits_end = False
            self._start_rank(slot)
            return
        groups = slot.groups if slot else []
        if overuse:
            for group in groups:
                group.note_overuse(overuse, f"the rank on GPU {self._place_of(gpu)[1]} of {node}")
        if exit_code == KILLED and groups:
            # The loss of an agent kills its ranks, and a rank's end may be reported first.
            self._killed[gpu] = time.monotonic() + NODE_LOSS_DELAY_S
        else:
            self._record_lost_rank(gpu, exit_code)

    def report(self, event: Any) -> None:
        """Keep an event about states for the scheduling of hops."""
        self._is_urgent = True
        self.reports.append(event)

    def on_return(self, node: str) -> None:
        """Record the return of a lost node."""
        self.returned.append(node)
        self.reports.append(StoreLost(node))

    def on_loss(
        self, step: str, exit_code: int, node: str = "", output: str = "", lost_node: str | None = None
    ) -> None:
        """Record the loss of a step's ranks.

        Parameters
        ----------
        node : str
            Planned node of the ranks; empty for all nodes of the step.
        output : str
            Output of the launcher.
        lost_node : str or None
            Node lost with the ranks, if any.
        """
        of_step = [gpu for gpu, slot in self._slots.items() if slot.step == step]
        for gpu in [gpu for gpu in of_step if node in ("", gpu[0])]:
            self._record_lost_rank(gpu, exit_code, output, lost_node)

    def _groups_by_gpu(self) -> dict[NodeGpu, list[RankGroup]]:
        found: dict[NodeGpu, list[RankGroup]] = {}
        for gpu, slot in self._slots.items():
            if slot.groups:
                found.setdefault(self._place_of(gpu), []).extend(slot.groups)
        return found

    def _host_of(self, gpu: NodeGpu) -> RankSlot | None:
        """Return the rank that trains fused members on the GPU of this number; None if there is none."""
        at_work = self._groups_by_gpu().get(self._place_of(gpu), ())
        return next((g.slots[0] for g in at_work if g.task.kind == FUSED and g.ending is None), None)

    def _divide_time(self) -> None:
        """Count the time since the last call for those who share a GPU."""
        now, before = time.monotonic(), self._divided_at
        self._divided_at = now
        for groups in self._groups_by_gpu().values() if self._has_seats else ():
            if groups[0].placement[0].seat:
                for group in groups:
                    group.divided_s = (group.divided_s or 0.0) + (now - before) / len(groups)

    def _rank_for(self, gpu: NodeGpu, step: str, code: TrainingCode | None) -> RankSlot:
        """Return the GPU's rank, or a new one if there is none or it has loaded other code."""
        slot = self._slots.get(gpu)
        if slot is None:
            slot = self._slots[gpu] = RankSlot(gpu, step, code=code)
            self._start_rank(slot)
        elif slot.leaving or (code and slot.code and slot.code != code):
            if not slot.leaving:
                self.agents.send(step, gpu, TO, {"shutdown": True})
            slot = self._slots[gpu] = RankSlot(gpu, step, awaits_end=True)
        slot.code = code or slot.code
        return slot

    def _end_idle(self, gpus: Set[NodeGpu]) -> None:
        """End the ranks without work in other seats on GPUs of these numbers."""
        places = set(map(self._place_of, gpus))
        for gpu, slot in self._slots.items():
            if gpu not in gpus and self._place_of(gpu) in places and not (slot.groups or slot.leaving):
                slot.leaving = True
                self.agents.send(slot.step, gpu, TO, {"shutdown": True})

    def _place_of(self, gpu: NodeGpu) -> NodeGpu:
        """Return the GPU of a rank."""
        return gpu[0], gpu[1] % self.agents.site.gpus_per_node

    def _start_rank(self, slot: RankSlot) -> None:
        self.agents.start_rank(slot.step, slot.gpu, slot.code.framework if slot.code else None)

    def _record_lost_rank(
        self, gpu: NodeGpu, exit_code: int, output: str = "", lost_node: str | None = None
    ) -> None:
        self._killed.pop(gpu, None)
        if slot := self._slots.pop(gpu, None):
            at_work = [group for group in slot.groups if slot in group.working]
            for group in at_work:
                # A lost node says nothing against any of them.
                group.beside_others = lost_node is None and len(at_work) > 1
                group.record_lost_rank(slot, exit_code, output, lost_node)
            # Also for a rank in a group: it may have been writing the last member's checkpoint.
            self.reports.append(RankEnded(worker_named(gpu[0], gpu[1:])))

    def _record_killed_ranks(self, now: float) -> None:
        """Record the loss of ranks killed `NODE_LOSS_DELAY_S` ago whose agents still run."""
        for gpu in [gpu for gpu, due in self._killed.items() if now >= due]:
            slot = self._slots.get(gpu)
            if slot is None or self.agents.serves(slot.step, gpu):
                self._record_lost_rank(gpu, KILLED)

    def _assign(self, running: RankGroup) -> None:
        """Send assignments to ready ranks; all but rank 0 need the address that rank 0 reports."""
        if running.ending is not None or len(running.assigned) == len(running.slots):
            return
        # They may have what the group needs of its GPUs.
        leaving = {self._place_of(gpu) for gpu, slot in self._slots.items() if slot.leaving}
        if not leaving.isdisjoint(self._place_of(slot.gpu) for slot in running.slots):
            return
        for rank, slot in enumerate(running.slots):
            if rank in running.assigned or not slot.ready or (rank and running.master is None):
                continue
            master = running.master if rank else None
            spans_nodes = len({placed.node for placed in running.placement}) > 1
            identity = self.agents.identity if spans_nodes else None
            rank_info = RankInfo(rank, len(running.slots), running.key, master, identity)
            running.assigned.add(rank)
            assignment = encode(Assignment(running.task, rank_info, running.started_at, bool(running.steps)))
            for message in ({"task": assignment}, *running.told):
                self.agents.send(slot.step, slot.gpu, TO, message)

    def _tell(self, running: RankGroup, message: dict[str, str]) -> None:
        """Send a message to the ranks of a group, now or after their assignments."""
        running.told.append(message)
        for rank in running.assigned:
            slot = running.slots[rank]
            self.agents.send(slot.step, slot.gpu, TO, message)

    def _watch(self, running: RankGroup) -> None:
        """Kill a group that hangs, and the rest of a failed one: they can write no checkpoint.

        End a group by signals if it was told to stop and does not do so within the grace period.
        """
        now, ending_s = time.monotonic(), self._timeouts.ending_s
        if running.over:
            return
        late_s = now - running.stopping_since
        if due := [number for share, number in RANK_SIGNALS if late_s > share * self._grace_s]:
            running.terminated = True
            self._signal(running, due[-1])
        if running.ending is None and now - running.last_message_at > self._timeouts.hang_s:
            running.hung = True
            running.end()
            # A hung group does not end by itself: kill it without the time limit for its end.
            running.ending = now - ending_s
        if running.ending is not None and now - running.ending >= ending_s:
            running.killed = not running.hung
            self._signal(running, signal.SIGKILL)

    def _signal(self, running: RankGroup, number: signal.Signals) -> None:
        for slot in running.working:
            self.agents.send(slot.step, slot.gpu, SIGNAL, int(number))
