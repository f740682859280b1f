"""The scheduling of one batch job as a state machine: events in, commands out.

It has no clock, opens no file and starts no process. The driver sends the events of its ranks and the
simulator those of its virtual clock; both carry out the commands and decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetctl.model.exit_reason import CLEAN_EXITS, JOB_FATAL, ExitReason
from hetctl.model.plan import Allocation
from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import has_room, least_task_s, task_s
from hetctl.perf.seen_rates import is_noteworthy
from hetctl.scheduling import events
from hetctl.scheduling.commands import Command, EndJob, EndRound, ScheduleTick, Start, Stop, Task
from hetctl.scheduling.events import SchedulingEvent
from hetctl.scheduling.observer import ObservedMembers, Observer
from hetctl.scheduling.planners.base import Decision, Options, Planner, Request, plan_fitting
from hetctl.scheduling.pool import Pool
from hetctl.scheduling.rounds import DEADLINE, SIGNAL, OpenRound, RunningTask, round_s, should_stop

POLL_S = 0.05
"""Least time between two calls of the planner, in seconds; changes meanwhile are handled together."""
LAUNCH_PAUSES_S = {ExitReason.NOT_LAUNCHED: 5.0, ExitReason.DISK_ERROR: 30.0}
"""Pauses in seconds before the next start after the end of a task, if this could end the next one, too."""
LONGEST_LAUNCH_PAUSE_S = 300.0
DEFER_SHARE = 0.005
"""Share of a job's time during which the planner is not called for members that were left out.

With thousands of members, a call of the planner takes long.
"""
FINISHED = "finished"
RESIZE, PREEMPTED = "resize", "preempted"
"""Reasons for which the planner takes a member's GPUs: to change their number, or to let it wait."""


@dataclass(frozen=True)
class JobOptions:
    """Rules of a job that do not depend on its planner.

    Parameters
    ----------
    round_overhead_s : float
        Time from the start of a round, except the job's first, to the start of its tasks, in seconds.
    """

    round_overhead_s: float = 0.0


class LaunchPauses:
    """Pauses after the ends of tasks, which double with each one in a row of the same member."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self.until_s = -math.inf
        """Time before which no task is started."""

    def add(self, event: events.TaskEnded) -> None:
        """Pause after the end of a task if its reason could end the next one, too."""
        pause_s = LAUNCH_PAUSES_S.get(event.reason)
        earlier = self._in_a_row.pop(event.name, 0)
        if pause_s is not None:
            self._in_a_row[event.name] = earlier + 1
            longer_s = min(pause_s * 2**earlier, LONGEST_LAUNCH_PAUSE_S)
            self.until_s = max(self.until_s, event.now_s + longer_s)


PlanFunction = Callable[[Planner, Request, Callable[[Allocation], bool]], tuple[Decision, tuple[str, ...]]]


class Core:
    """State machine that schedules one job.

    Pass the events of one time to `handle` one by one, a `Tick` first; then call `schedule`, which
    decides. Carry out the commands of each call in their order.

    Attributes
    ----------
    running : dict of str to RunningTask
        Tasks by name.
    ending : str or None
        Reason for which the job ends; then no task is started any more.
    """

    def __init__(
        self,
        planner: Planner,
        options: Options,
        job: JobOptions,
        observer: Observer,
        plan: PlanFunction = plan_fitting,
    ) -> None:
        self.running: dict[str, RunningTask] = {}
        self.ending: str | None = None
        self._planner, self._options, self._job = planner, options, job
        self._observer, self._plan_fitting = observer, plan
        self._alpha = planner.stop_share(options)
        self._pool = Pool()
        self._rounds: dict[int, OpenRound] = {}
        self._pending: list[Allocation] = []
        self._no_room: dict[str, int] = {}
        self._deferred_until_s: dict[str, float] = {}
        self._refused: tuple[str, float] | None = None
        self._replan_at_s, self._plan_from_s = math.inf, -math.inf
        self._pauses = LaunchPauses()
        self._fresh = self._changed = True
        self._commands: list[Command] = []

    @property
    def handles(self) -> frozenset[type]:
        """Kinds of events that it accepts."""
        return frozenset(_HANDLERS)

    def handle(self, event: SchedulingEvent) -> list[Command]:
        """Record an event and return the commands that follow at once."""
        _HANDLERS[type(event)](self, event)
        return self._take_commands()

    def schedule(self, now_s: float) -> list[Command]:
        """Return the commands that follow from all events until now."""
        self._stop_small_rounds(now_s)
        if not self.ending and now_s >= self._pauses.until_s:
            if now_s >= self._plan_from_s and self._may_plan():
                self._plan(now_s)
            self._start_pending(now_s)
        if self.ending and not self._rounds:
            self._commands.append(EndJob(self.ending, self._refused))
        elif (at_s := self._next_s(now_s)) < math.inf:
            self._commands.append(ScheduleTick(at_s))
        return self._take_commands()

    def _take_commands(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    def _on_job_opened(self, event: events.JobOpened) -> None:
        self._pool.add(event.nodes)
        self._deadline_s = event.deadline_s
        self._defer_s = DEFER_SHARE * (event.deadline_s - event.now_s)
        self._max_uninterrupted_s = event.max_uninterrupted_s
        self._next_round = event.first_round
        self._planner_state = event.planner_state
        self._on_tick(event)

    def _on_tick(self, event: events.JobOpened | events.Tick) -> None:
        if event.now_s >= self._replan_at_s:
            self._replan_at_s, self._changed = math.inf, True
        if event.now_s >= self._deadline_s:
            self._end(DEADLINE)

    def _on_node_joined(self, event: events.NodeJoined) -> None:
        self._pool.add([event.node])
        # A group that lost its ranks on a node which is back at once holds the GPUs until it has ended.
        for running in self.running.values():
            self._pool.take(running.task.allocation.placement)
        self._changed = True

    def _on_node_lost(self, event: events.NodeLost) -> None:
        """Continue on the remaining nodes; members of the lost node have ended and are planned again."""
        self._pool.remove(event.node)
        self._pending = [allocation for allocation in self._pending if self._pool.has(allocation.placement)]
        self._changed = True
        if not self._pool.nodes:
            self._end(ExitReason.NODE_FAILURE.value)

    def _on_member_arrived(self, _event: events.MemberArrived) -> None:
        self._changed = True

    def _on_task_signalled(self, event: events.TaskSignalled) -> None:
        """Stop the whole group, unless it is already stopping."""
        task = self.running[event.name]
        if not task.stopping:
            self._stop_member(event.name, SIGNAL)

    def _on_task_ended(self, event: events.TaskEnded) -> None:
        ended = self.running.pop(event.name)
        ended_round = self._rounds[ended.round]
        self._pool.release(ended.task.allocation.placement)
        ended_round.running.discard(event.name)
        ended_round.released = True
        ended_round.failed |= event.reason not in CLEAN_EXITS
        # A member that was told to leave still needs training, so alpha counts its GPUs as active.
        if event.reason is not ExitReason.STOPPED:
            del ended_round.held[event.name]
        # The planner stopped this member itself: its exit is no new information for it.
        by_planner = ended_round.reasons.get(event.name) in (RESIZE, PREEMPTED)
        self._changed |= event.reason is not ExitReason.STOPPED or not by_planner
        if event.no_room:
            self._no_room[event.name] = ended.task.allocation.gpus
        self._react_to_end(event)
        if not ended_round.running:
            self._commands.append(EndRound(ended.round, ended_round.ended_by))
            del self._rounds[ended.round]

    def _react_to_end(self, event: events.TaskEnded) -> None:
        """End the job or delay the next launch if the end of a task requires it."""
        if event.reason in JOB_FATAL:
            self._end(event.reason.value)
        self._pauses.add(event)

    def _on_epoch_done(self, event: events.EpochDone) -> None:
        """Call an elastic planner again if a member's rate differs much from the planned one."""
        task = self.running.get(event.member)
        if task and self._planner.paradigm == "elastic" and is_noteworthy(task.rate, event.rate):
            task.rate, self._changed = event.rate, True

    def _on_job_ending(self, event: events.JobEnding) -> None:
        self._end(event.reason)

    def _end(self, reason: str) -> None:
        """Start no more tasks and stop all members; the first reason is kept."""
        if self.ending:
            return
        self.ending = reason
        for number in self._rounds:
            self._stop_round(number, reason, at_once=True)

    def _stop_round(self, number: int, reason: str, *, at_once: bool = False) -> None:
        stopped = self._rounds[number]
        stopped.stopped_by = stopped.stopped_by or reason
        for name in stopped.running:
            self.running[name].stopping = True
        self._commands.append(Stop(number, reason, at_once=at_once))

    def _stop_small_rounds(self, now_s: float) -> None:
        """Stop a round when too few of its GPUs are active (FLEET, section 4.3.2, "Training")."""
        released = [number for number, opened in self._rounds.items() if opened.released]
        for number in released:
            self._rounds[number].released = False
        # Only an end of a task can make a round too small; `left` of a large run takes long.
        if not self._alpha or not released:
            return
        left = self._observer.left(now_s)
        for number in released:
            if not self._rounds[number].stopped_by and self._is_too_small(self._rounds[number], left):
                self._stop_round(number, "alpha")

    def _is_too_small(self, opened: OpenRound, left: Mapping[str, Workload]) -> bool:
        active = {name: gpus for name, gpus in opened.held.items() if name in left}
        waiting = len(left) > len(active)
        # If members wait, the limits of the others do not matter, and they take long to compute.
        max_gpus = {} if waiting else {name: left[name].max_gpus for name in active}
        return should_stop(active, opened.allocated, self._alpha, waiting=waiting, max_gpus=max_gpus)

    @property
    def _is_idle(self) -> bool:
        return not self._rounds and not self._pending

    def _may_plan(self) -> bool:
        """Return true if planning is due: a change, no pending start, and the paradigm permits it."""
        if self._is_idle:
            return True
        if self._pending or not self._changed:
            return False
        return {
            "global": not self._rounds,
            "local": self._pool.free_gpus > 0,
            "elastic": True,
        }[self._planner.paradigm]

    def _plan(self, now_s: float) -> None:
        """Call the planner; stop the members whose GPUs it takes, and store its allocations."""
        self._changed = False
        seen = self._observer.seen(now_s, self.running, self._deferred(now_s))
        request = self._request(seen, now_s)
        if not request.workloads and not request.held:
            if self._is_idle:
                self._end(DEADLINE if seen.left else FINISHED)
            return
        self._plan_from_s = now_s + POLL_S
        if not request.nodes and not request.held:
            if not self._pool.nodes:
                self._end(ExitReason.NODE_FAILURE.value)
            return
        decision, left_out = self._plan_fitting(
            self._planner, request, lambda a: self._fits(seen.left, a, now_s)
        )
        self._defer(left_out, now_s)
        # Stored with the next round's start, so that a later job continues from a decision in force.
        self._planner_state = decision.planner_state
        self._replan_at_s = math.inf if decision.replan_at_s is None else decision.replan_at_s
        self._pending = list(decision.start)
        self._stop_members(decision)
        if self._is_idle:
            self._end(DEADLINE)

    def _request(self, seen: ObservedMembers, now_s: float) -> Request:
        return Request(
            workloads=seen.waiting,
            nodes=self._pool.free,
            gpus=self._pool.gpus,
            round_index=self._next_round,
            options=self._options,
            held=seen.held if self._planner.paradigm == "elastic" else (),
            cluster=self._pool.nodes,
            now_s=now_s,
            planner_state=self._planner_state,
        )

    def _fits(self, left: Mapping[str, Workload], allocation: Allocation, now_s: float) -> bool:
        """Return true if the member could make progress before the deadline with all work it may have left.

        With an estimate of the work instead, it might lose its GPUs and then not fit on others.
        """
        if self._deadline_s == math.inf:
            return True
        workload, start_s = left[allocation.member], self._start_s(now_s)
        # It left by its own clock; on as many GPUs it would start, restore and leave again.
        more = allocation.gpus > self._no_room.get(workload.name, 0)
        if more and has_room(workload, allocation.rate, start_s, self._deadline_s, self._max_uninterrupted_s):
            return True
        self._refused = workload.name, least_task_s(workload, allocation.rate, self._max_uninterrupted_s)
        return False

    def _start_s(self, now_s: float) -> float:
        return now_s if self._fresh else now_s + self._job.round_overhead_s

    def _defer(self, left_out: Iterable[str], now_s: float) -> None:
        """Defer members without room: the planner is not called for them for some time, or in this job.

        A local planner that does not share considers members one by one and would give the same GPUs again.
        """
        is_final = self._planner.paradigm == "local" and not self._planner.shares
        until_s = math.inf if is_final else now_s + self._defer_s
        self._deferred_until_s.update((name, until_s) for name in left_out if name not in self.running)

    def _deferred(self, now_s: float) -> set[str]:
        """Return the members to leave out; temporary deferrals do not count while no member trains."""
        return {
            name
            for name, until_s in self._deferred_until_s.items()
            if until_s > now_s and (self.running or until_s == math.inf)
        }

    def _stop_members(self, decision: Decision) -> None:
        given = {allocation.member for allocation in decision.start}
        for name in (*decision.stop, *(allocation.member for allocation in decision.start)):
            if name in self.running:
                self._stop_member(name, RESIZE if name in given else PREEMPTED)

    def _stop_member(self, name: str, reason: str) -> None:
        task = self.running[name]
        task.stopping = True
        self._rounds[task.round].reasons[name] = reason
        self._commands.append(Stop(task.round, reason, name))

    def _start_pending(self, now_s: float) -> None:
        """Start one round with all whose GPUs are free, except members that are done or no longer fit."""
        ready: list[Allocation] = []
        waiting: list[Allocation] = []
        for allocation in self._pending:
            (ready if self._is_ready(allocation) else waiting).append(allocation)
        if not ready:
            return
        self._pending = waiting
        left = self._observer.left(now_s)
        # Time has passed since the decision: GPUs may have been waited for, or a member may have converged.
        starting = [a for a in ready if a.member in left and self._fits(left, a, now_s)]
        self._changed |= len(starting) < len(ready)
        if starting and (limit := self._observer.used_up()):
            self._end(limit)
        elif starting:
            self._open_round(starting, left, now_s)

    def _is_ready(self, allocation: Allocation) -> bool:
        return allocation.member not in self.running and self._pool.can_hold(allocation.placement)

    def _open_round(
        self, allocations: Sequence[Allocation], left: Mapping[str, Workload], now_s: float
    ) -> None:
        number, self._next_round = self._next_round, self._next_round + 1
        held = {allocation.member: allocation.gpus for allocation in allocations}
        self._rounds[number] = OpenRound(sum(held.values()), held, set(held))
        tasks = tuple(Task(allocation) for allocation in allocations)
        for task in tasks:
            self._pool.take(task.allocation.placement)
            self.running[task.name] = RunningTask(task, number, task.allocation.rate, self._start_s(now_s))
        ends = [(task_s(left[a.member], a.rate), a.gpus) for a in allocations]
        self._commands.append(Start(number, tasks, round_s(ends, self._alpha), self._planner_state))
        self._fresh = False

    def _next_s(self, now_s: float) -> float:
        """Return the time of the next action if no event comes before."""
        if self.ending:
            return math.inf
        if now_s < self._pauses.until_s:
            return self._pauses.until_s
        return min(self._replan_at_s, max(self._plan_from_s, now_s) if self._may_plan() else math.inf)


_HANDLERS: Mapping[type, Callable[[Core, Any], None]] = {
    events.JobOpened: Core._on_job_opened,
    events.NodeJoined: Core._on_node_joined,
    events.NodeLost: Core._on_node_lost,
    events.MemberArrived: Core._on_member_arrived,
    events.TaskSignalled: Core._on_task_signalled,
    events.TaskEnded: Core._on_task_ended,
    events.EpochDone: Core._on_epoch_done,
    events.Tick: Core._on_tick,
    events.JobEnding: Core._on_job_ending,
}
