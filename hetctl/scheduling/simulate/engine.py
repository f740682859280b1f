"""Run under a virtual clock: the scheduling of its jobs, and members that only count samples."""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from hetctl.model.errors import InfeasibleError
from hetctl.model.events import ExitReason
from hetctl.model.plan import FUSED, Allocation
from hetctl.model.workload import Workload
from hetctl.perf.sharing import slowdown
from hetctl.scheduling.commands import Command, EndJob, EndRound, ScheduleTick, Start, Stop
from hetctl.scheduling.events import (
    JobOpened,
    MemberArrived,
    NodeLost,
    RateSeen,
    SchedulingEvent,
    TaskEnded,
    Tick,
)
from hetctl.scheduling.planners.base import Decision, Options, Planner, Request, plan_fitting
from hetctl.scheduling.round_scheduler import RoundScheduler
from hetctl.scheduling.simulate.scenario import Arrival, JobTiming, Scenario, Successors
from hetctl.scheduling.simulate.simulated_members import SimulatedMembers
from hetctl.scheduling.simulate.simulated_task import SimulatedTask, after_failure, begin, stopped, with_rate

Note = Callable[[Request, Decision], None]


TASK_ENDS, NODE_FAILS, NODE_RETURNS, RATE_KNOWN = range(4)
"""Kinds of events on the virtual clock; simultaneous ones occur in this order."""


class Engine:
    """Simulated run at `now` seconds.

    After `run`, `tasks` holds every task in the order of their starts, `planning_s` the seconds that the
    planner took for each decision, and `followed` the members that came after others.
    """

    def __init__(
        self,
        planner: Planner,
        arrivals: Iterable[Arrival],
        scenario: Scenario,
        options: Options,
        note: Note | None = None,
        successors: Successors | None = None,
    ) -> None:
        self._members = SimulatedMembers(planner, options, scenario.work_estimator, scenario.rate_learner)
        self.tasks = self._members.tasks
        self.planning_s: list[float] = []
        self.now = 0.0
        self._planner, self._scenario, self._options, self._note = planner, scenario, options, note
        self._successors, self.followed = successors, list[Workload]()
        self._ended_gpu_s = 0.0
        self._timing = scenario.timing
        self._types = {node.name: node.gpu_type or "" for node in scenario.cluster.nodes}
        self._arrivals = deque(sorted(arrivals, key=lambda arrival: arrival.at_s))
        self._rounds: dict[int, set[int]] = {}
        self._touched: set[int] = set()
        self._shared: dict[tuple[str, int], set[int]] = defaultdict(set)
        """Tasks in seats by node and GPU."""
        self._shared_since: dict[tuple[str, int], float] = {}
        self._touched_gpus: set[tuple[str, int]] = set()
        self._down: set[str] = set()
        self._next_round, self._planner_state = 0, None
        self._queue: list[tuple[float, int, int, str]] = []
        # Failures are drawn in the order of nodes and of time, so that a seed gives the same failures again.
        self._random = random.Random(scenario.failures.seed if scenario.failures else 0)
        for node in scenario.cluster.nodes:
            self._schedule_failure(node.name, 0.0)

    def run(self) -> Engine:
        """Simulate until every member has converged.

        Raises
        ------
        InfeasibleError
            If a job is too short for some member to make any progress.
        """
        self._wait_until(0.0)
        while self._members.unfinished or self._arrivals:
            ended = self._run_job()
            nodes_are_missing = self._fresh and ended.refused is None and self._down
            if not self._members.unfinished or nodes_are_missing:
                self._wait_until(self._next_s())
            elif self._fresh:
                raise _too_short(self._timing, *(ended.refused or ("", 0.0)))
            else:
                self._wait_until(self.now + self._timing.job_overhead_s)
        return self

    def _wait_until(self, at_s: float) -> None:
        """Advance the time between two jobs."""
        self.now = at_s
        # Between jobs there is no scheduling to receive events: the generator only runs for its side effects.
        deque(self._due_events(), maxlen=0)

    def _run_job(self) -> EndJob:
        self._open_job()
        self.now += self._timing.job_start_s
        self._schedule()
        while self._ended is None:
            # A planner may ask for a call in the past; time does not go back.
            self.now = max(min(self._next_s(), self._tick_at_s), self.now)
            self._send(Tick(self.now))
            for event in self._due_events():
                self._send(event)
            self._schedule()
        return self._ended

    def _open_job(self) -> None:
        nodes = tuple(node for node in self._scenario.cluster.nodes if node.name not in self._down)
        deadline_s = self.now + self._timing.usable_s
        self._opened = JobOpened(self.now, nodes, deadline_s, self._next_round, self._planner_state)
        self._fresh = True
        self._ended: EndJob | None = None
        self._scheduler = RoundScheduler(
            self._planner, self._options, self._members, self._plan_fitting, self._timing.round_overhead_s
        )
        self._send(self._opened)

    def _next_s(self) -> float:
        while self._queue and self._is_stale(self._queue[0]):
            heapq.heappop(self._queue)
        queued_s = self._queue[0][0] if self._queue else math.inf
        return min(queued_s, self._arrivals[0].at_s if self._arrivals else math.inf)

    def _send(self, event: SchedulingEvent) -> None:
        self._carry_out(self._scheduler.handle(event))

    def _schedule(self) -> None:
        self._tick_at_s = math.inf
        self._carry_out(self._scheduler.schedule(self.now))
        for number in self._touched & self._rounds.keys():
            self._set_pace(self._rounds[number])
        for gpu in self._touched_gpus:
            self._set_shared_pace(self._shared[gpu])
        self._touched.clear()
        self._touched_gpus.clear()

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Start():
                    self._start(command)
                case Stop():
                    self._stop(command)
                case EndRound():
                    del self._rounds[command.round]
                case ScheduleTick():
                    self._tick_at_s = command.at_s
                case EndJob():
                    self._ended = command

    def _start(self, command: Start) -> None:
        allocations = [task.allocation for task in command.tasks]
        if self._scenario.rate_learner:
            # Planners do not know the members' true rates.
            allocations = [
                replace(a, rate=self._members.unfinished[a.member].rates[a.gpus]) for a in allocations
            ]
        start_s = self.now if self._fresh else self.now + self._timing.round_overhead_s
        rate = min(a.rate for a in allocations) if self._is_lockstep else None
        self._rounds[command.round] = set()
        for allocation in allocations:
            workload = self._members.unfinished[allocation.member]
            task = begin(workload, allocation, command.round, start_s, *self._limits, rate)
            assert task is not None
            index = self._members.begin(task)
            self._rounds[command.round].add(index)
            if gpu := shared_gpu(allocation):
                self._shared[gpu].add(index)
                self._touched_gpus.add(gpu)
                self._shared_since.setdefault(gpu, start_s)
            self._expect(index)
            if learner := self._scenario.rate_learner:
                heapq.heappush(self._queue, (task.ready_s + learner.known_s, RATE_KNOWN, index, ""))
        self._next_round, self._planner_state = command.round + 1, command.planner_state
        self._fresh = False

    @property
    def _is_lockstep(self) -> bool:
        return self._planner.trains_as_group and self._scenario.lockstep

    @property
    def _limits(self) -> tuple[float, float]:
        return self._opened.deadline_s, self._opened.max_uninterrupted_s

    def _stop(self, command: Stop) -> None:
        one = command.member
        for index in self._rounds[command.round] if one is None else [self._members.running[one]]:
            self.tasks[index] = stopped(self.tasks[index], self.now)
            self._expect(index)

    def _expect(self, index: int) -> None:
        # The entry of the earlier end stays in the queue and is recognised as stale by its time.
        heapq.heappush(self._queue, (self.tasks[index].end_s, TASK_ENDS, index, ""))

    def _is_stale(self, due: tuple[float, int, int, str]) -> bool:
        at_s, kind, index, _ = due
        if kind not in (TASK_ENDS, RATE_KNOWN):
            return False
        task = self.tasks[index]
        has_moved = kind == TASK_ENDS and task.end_s != at_s
        return has_moved or self._members.running.get(task.workload.name) != index

    def _due_events(self) -> Iterator[SchedulingEvent]:
        """Yield all events that are due by now."""
        while self._queue and self._queue[0][0] <= self.now:
            due = heapq.heappop(self._queue)
            _, kind, index, node = due
            if kind == NODE_FAILS:
                yield from self._fail_node(node)
            elif kind == NODE_RETURNS:
                # The next job uses it.
                self._down.discard(node)
            elif kind == RATE_KNOWN and not self._is_stale(due):
                yield self._see_rate(index)
            elif not self._is_stale(due):
                yield self._end(index, ExitReason.STOPPED)
        while self._arrivals and self._arrivals[0].at_s <= self.now:
            workload = self._arrivals.popleft().workload
            self._members.add(workload)
            yield MemberArrived(self.now, workload.name)

    def _see_rate(self, index: int) -> RateSeen:
        task = self.tasks[index]
        allocation = task.allocation
        assert self._scenario.rate_learner is not None
        if allocation.own_gpus or allocation.alone:
            busy = task.workload.busy if allocation.gpus == 1 else None
            self._scenario.rate_learner.report(allocation.member, allocation.gpus, allocation.rate, busy)
        return RateSeen(self.now, allocation.member, task.rate)

    def _fail_node(self, node: str) -> Iterator[SchedulingEvent]:
        """Let a node fail, and all tasks with GPUs on it."""
        failures = self._scenario.failures
        assert failures is not None
        returns_s = self.now + failures.repair_s
        heapq.heappush(self._queue, (returns_s, NODE_RETURNS, 0, node))
        self._schedule_failure(node, returns_s)
        self._down.add(node)
        # A list, since the end of a task changes the running ones.
        for index in list(self._members.running.values()):
            task = self.tasks[index]
            if any(part.node == node for part in task.allocation.placement):
                self.tasks[index] = after_failure(task, self.now, failures.checkpoint_every_s)
                yield self._end(index, ExitReason.NODE_FAILURE)
        yield NodeLost(self.now, node)

    def _schedule_failure(self, node: str, up_s: float) -> None:
        if self._scenario.failures is not None:
            fails_s = up_s + self._random.expovariate(1 / self._scenario.failures.node_mtbf_s)
            heapq.heappush(self._queue, (fails_s, NODE_FAILS, 0, node))

    def _end(self, index: int, reason: ExitReason) -> TaskEnded:
        """End a task, with that reason if the member has not converged."""
        task = self._members.end(index)
        self._rounds[task.round_index].discard(index)
        self._touched.add(task.round_index)
        if gpu := shared_gpu(task.allocation):
            self._shared[gpu].discard(index)
            self._touched_gpus.add(gpu)
            if not self._shared[gpu]:
                self._ended_gpu_s += task.end_s - self._shared_since.pop(gpu)
        else:
            self._ended_gpu_s += task.allocation.gpus * (task.end_s - task.start_s)
        if task.converged:
            self._follow(task.workload.name)
            return TaskEnded(self.now, task.workload.name, ExitReason.FINISHED)
        no_room = reason is ExitReason.STOPPED and not self._is_stopping(task)
        return TaskEnded(self.now, task.workload.name, reason, no_room)

    def _follow(self, member: str) -> None:
        """Let the members that follow one arrive now."""
        if self._successors is not None:
            running = (self.tasks[index] for index in self._members.running.values())
            held = [task for task in running if not shared_gpu(task.allocation)]
            held_s = [(min(task.end_s, self.now) - task.start_s) * task.allocation.gpus for task in held]
            # Members that share a GPU hold it together, from the first one on.
            held_s += [max(0.0, self.now - since_s) for since_s in self._shared_since.values()]
            for workload in self._successors(member, self.now, self._ended_gpu_s + math.fsum(held_s)):
                self.followed.append(workload)
                self._arrivals.appendleft(Arrival(workload, self.now))

    def _is_stopping(self, task: SimulatedTask) -> bool:
        return self._scheduler.running[task.workload.name].stopping

    def _set_pace(self, indices: Iterable[int]) -> None:
        """Set the rates of members that share their data to the slowest one's."""
        if not self._is_lockstep:
            return
        rate = min(self.tasks[index].allocation.rate for index in indices)
        for index in indices:
            self._set_rate(index, rate)

    def _set_shared_pace(self, indices: Iterable[int]) -> None:
        """Set the rates of members that share a GPU."""
        tasks = {index: self.tasks[index] for index in indices}
        slower = slowdown(task.workload.busy for task in tasks.values())
        for index, task in tasks.items():
            if task.allocation.mode == FUSED:
                slower = len(tasks) / task.workload.fused_gain(len(tasks))
            gpu_type = self._types[task.allocation.placement[0].node]
            self._set_rate(index, task.workload.on_type(gpu_type).rates[1] / slower)

    def _set_rate(self, index: int, rate: float) -> None:
        task = self.tasks[index]
        if task.rate != rate and not self._is_stopping(task):
            self.tasks[index] = with_rate(task, self.now, rate, *self._limits)
            self._expect(index)

    def _plan_fitting(
        self, planner: Planner, request: Request, fits: Callable[[Allocation], bool]
    ) -> tuple[Decision, tuple[str, ...]]:
        began = time.perf_counter()
        decision, left_out = plan_fitting(planner, request, fits)
        self.planning_s.append(time.perf_counter() - began)
        if self._note:
            self._note(request, decision)
        return decision, left_out


def shared_gpu(allocation: Allocation) -> tuple[str, int] | None:
    """Return the node and the GPU of a member in a seat; None of any other."""
    return next(((part.node, part.gpus[0]) for part in allocation.placement if part.seat), None)


def _too_short(timing: JobTiming, member: str, needed_s: float) -> InfeasibleError:
    minutes, seconds = divmod(math.floor(timing.wall_s or 0.0), 60)
    limit = f"{minutes // 60}:{minutes % 60:02}" + (f":{seconds:02}" if seconds else "")
    whole_s = needed_s + timing.grace_s
    needed = f"{math.ceil(whole_s)} s" if whole_s < 120 else f"{math.ceil(whole_s / 60)} min"
    return InfeasibleError(
        f"round limit {limit} is shorter than start-up, checkpoint and grace of {member} ({needed});"
        " raise --time",
        hint="an epoch need not fit: a longer one is trained in parts",
    )
