"""The scheduling of a job in rounds, by a planner."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import field, replace

from hetctl.model.events import CLEAN_EXITS, ExitReason
from hetctl.model.plan import FUSED, Allocation
from hetctl.model.site import Node
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import has_room, least_task_s, task_s
from hetctl.perf.rate_prediction import is_noteworthy
from hetctl.scheduling import events
from hetctl.scheduling.commands import EndJob, EndRound, Start, Task
from hetctl.scheduling.fusing import FusedGroup, companions
from hetctl.scheduling.job_scheduler import ALONE, DEADLINE, FINISHED, JobScheduler, Observer
from hetctl.scheduling.planners.base import (
    Decision,
    Options,
    Planner,
    Request,
    WaitingQueue,
    plan_fitting,
)

POLL_S = 0.05
"""Least time between two calls of the planner, in seconds; changes meanwhile are handled together."""
DEFER_SHARE = 0.005
"""Share of a job's time during which the planner is not called for members that were left out.

With thousands of members, a call of the planner takes long.
"""
RESIZE, PREEMPTED = "resize", "preempted"
"""Reasons for which the planner takes a member's GPUs: to change their number, or to let it wait."""


PlanFunction = Callable[[Planner, Request, Callable[[Allocation], bool]], tuple[Decision, tuple[str, ...]]]


@dataclass
class OpenRound:
    """Tasks that started together.

    Parameters
    ----------
    allocated : int
        GPUs that the round was given.
    held : dict of str to int
        GPUs of members that have neither converged nor failed.
    running : set of str
        Names of the tasks that have not ended.
    reasons : dict of str to str
        Reasons of members that were stopped one by one.
    released : bool
        True if tasks have ended since the stop rule was last evaluated.
    """

    allocated: int
    held: dict[str, int]
    running: set[str]
    reasons: dict[str, str] = field(default_factory=dict)
    stopped_by: str | None = None
    failed: bool = False
    released: bool = False

    @property
    def ended_by(self) -> str:
        """Reason of the end of the round; trainers notice the deadline themselves."""
        if self.stopped_by or self.failed:
            return self.stopped_by or "failed"
        # Members without a reason left by their own clocks, before the driver stopped anything.
        reasons = [self.reasons.get(name, DEADLINE) for name in self.held]
        return reasons[-1] if reasons else "converged"


class RoundScheduler(JobScheduler):
    """Scheduling in which a planner gives members GPUs; those that start together are a round.

    Parameters
    ----------
    round_overhead_s : float
        Time from the start of a round, except the job's first, to the start of its tasks, in seconds.
    """

    def __init__(
        self,
        planner: Planner,
        options: Options,
        observer: Observer,
        plan: PlanFunction = plan_fitting,
        round_overhead_s: float = 0.0,
    ) -> None:
        super().__init__()
        self._alone, self._may_join = set[str](), False
        self._planner, self._options, self._round_overhead_s = planner, options, round_overhead_s
        self._observer, self._plan_fitting = observer, plan
        self._alpha = planner.stop_share(options)
        self._rounds: dict[int, OpenRound] = {}
        self._pending: list[Allocation] = []
        self._no_room: dict[str, int] = {}
        self._deferred_until_s: dict[str, float] = {}
        self._refused: tuple[str, float] | None = None
        self._replan_at_s, self._plan_from_s = math.inf, -math.inf
        self._fresh = self._changed = True
        self._handlers |= {
            events.MemberArrived: self._on_member_arrived,
            events.RateSeen: self._on_rate_seen,
        }

    def _start_tasks(self, now_s: float) -> None:
        if now_s >= self._plan_from_s and self._is_planning_due():
            self._plan(now_s)
        self._start_pending(now_s)
        self._join_fused(now_s)

    def _end_job(self, _now_s: float) -> None:
        self._commands.append(EndJob(self.ending or FINISHED, self._refused))

    def _on_job_opened(self, event: events.JobOpened) -> None:
        super()._on_job_opened(event)
        self._defer_s = DEFER_SHARE * (event.deadline_s - event.now_s)
        self._planner_state = event.planner_state

    def _on_tick(self, event: events.JobOpened | events.Tick) -> None:
        if event.now_s >= self._replan_at_s:
            self._replan_at_s, self._changed = math.inf, True
        super()._on_tick(event)

    def _on_node_joined(self, event: events.NodeJoined) -> None:
        super()._on_node_joined(event)
        self._changed = True

    def _on_node_lost(self, event: events.NodeLost) -> None:
        super()._on_node_lost(event)
        self._pending = [a for a in self._pending if self.pool.has(a.placement)]
        self._changed = True

    def _on_member_arrived(self, _event: events.MemberArrived) -> None:
        self._changed = self._may_join = True

    def _on_member_withdrawn(self, event: events.MemberWithdrawn) -> None:
        super()._on_member_withdrawn(event)
        self._pending = [a for a in self._pending if a.member != event.member]
        self._changed = True

    def _on_task_ended(self, event: events.TaskEnded) -> None:
        ended, self._may_join = self.running[event.name], True
        ended_round = self._rounds[ended.round]
        if event.alone:
            ended_round.reasons[event.name] = ALONE
            self._leave_alone(event.name)
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
        super()._on_task_ended(event)
        if not ended_round.running:
            self._commands.append(EndRound(ended.round, ended_round.ended_by))
            del self._rounds[ended.round]

    def _on_rate_seen(self, event: events.RateSeen) -> None:
        """Call an elastic planner again if a rate differs much from the planned one, or that was a guess."""
        task = self.running.get(event.member)
        # Fused members may have told that more of them are faster.
        self._may_join |= task is not None and task.task.allocation.mode == FUSED
        if not task or self._planner.paradigm != "elastic":
            return
        if task.is_guess or is_noteworthy(task.rate, event.rate):
            task.rate, task.is_guess, self._changed = event.rate, False, True

    def _stop_round(self, number: int, reason: str, *, at_once: bool = False) -> None:
        stopped = self._rounds[number]
        stopped.stopped_by = stopped.stopped_by or reason
        super()._stop_round(number, reason, at_once=at_once)

    def _review(self, now_s: float) -> None:
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
        active, shared = {}, set[tuple[str, int] | None]()
        for name in opened.held.keys() & left.keys():
            gpu = self._shared_gpu(name)
            # A GPU counts once.
            active[name] = 0 if gpu in shared else opened.held[name]
            shared |= {gpu} if gpu else set()
        waiting = len(left) > len(active)
        # If members wait, the limits of the others do not matter, and they take long to compute.
        max_gpus = {} if waiting else {name: left[name].max_gpus for name in active}
        return should_stop(active, opened.allocated, self._alpha, waiting=waiting, max_gpus=max_gpus)

    @property
    def _is_idle(self) -> bool:
        return not self._rounds and not self._pending

    def _is_planning_due(self) -> bool:
        """Return true if planning is due: a change, no pending start, and the paradigm permits it."""
        if self._is_idle:
            return True
        if self._pending or not self._changed:
            return False
        return {
            "global": not self._rounds,
            "local": self.pool.free_gpus > 0,
            "elastic": True,
        }[self._planner.paradigm]

    def _plan(self, now_s: float) -> None:
        """Call the planner; stop the members whose GPUs it takes, and store its allocations."""
        self._changed = False
        seen = self._observer.seen(now_s, self.running, self._deferred(now_s))
        is_elastic = self._planner.paradigm == "elastic"
        # An elastic planner would give the GPU of fused members to one of them.
        cluster = self._without_fused() if is_elastic else tuple(self.pool.nodes.values())
        held = [
            replace(each, workload=_on_least(each.workload)) if each.workload.is_guess else each
            for each in seen.held
            if is_elastic and each.allocation.mode != FUSED
        ]
        request = Request(
            workloads=_with_least_gpus(seen.waiting),
            nodes=self.pool.free,
            gpus=sum(len(node.gpus) for node in cluster),
            round_index=self._next_round,
            options=self._options,
            held=tuple(held),
            cluster=cluster,
            now_s=now_s,
            planner_state=self._planner_state,
        )
        if not request.workloads and not request.held:
            if self._is_idle:
                self._end(DEADLINE if seen.left else FINISHED, now_s)
            return
        self._plan_from_s = now_s + POLL_S
        if not request.nodes and not request.held:
            if not self.pool.nodes:
                self._end(ExitReason.NODE_FAILURE.value, now_s)
            return
        decision, left_out = self._plan_fitting(
            self._planner, request, lambda a: self._fits(seen.left, a, now_s)
        )
        self._defer(left_out, now_s)
        # Stored with the next round's start, so that a later job continues from a decision in force.
        self._planner_state = decision.planner_state
        self._replan_at_s = math.inf if decision.replan_at_s is None else decision.replan_at_s
        self._pending = list(decision.start)
        given = dict.fromkeys(allocation.member for allocation in decision.start)
        for name in (*decision.stop, *given):
            if name in self.running:
                self._stop(name, RESIZE if name in given else PREEMPTED)
        if self._is_idle:
            self._end(DEADLINE, now_s)

    def _fits(self, left: Mapping[str, Workload], allocation: Allocation, now_s: float) -> bool:
        """Return true if the member could make progress before the deadline with all work it may have left.

        With an estimate of the work instead, it might give up its GPUs and then fit nowhere.
        """
        if self._opened.deadline_s == math.inf:
            return True
        workload, start_s = left[allocation.member], self._start_s(now_s)
        # A member that left by its own clock would leave again on as many GPUs.
        more = allocation.gpus > self._no_room.get(workload.name, 0)
        longest_s = self._opened.max_uninterrupted_s
        if more and has_room(workload, allocation.rate, start_s, self._opened.deadline_s, longest_s):
            return True
        # Without any known rate, a member may take far less time than is expected.
        if more and workload.is_guess and start_s + workload.startup_s < self._opened.deadline_s:
            return True
        self._refused = workload.name, least_task_s(workload, allocation.rate, longest_s)
        return False

    def _start_s(self, now_s: float) -> float:
        return now_s if self._fresh else now_s + self._round_overhead_s

    def _defer(self, left_out: Iterable[str], now_s: float) -> None:
        """Defer members without room: the planner is not called for them for some time, or in this job.

        A local planner that does not share considers members one by one and would give the same GPUs again.
        """
        is_final = self._planner.paradigm == "local" and not self._planner.trains_as_group
        until_s = math.inf if is_final else now_s + self._defer_s
        self._deferred_until_s.update((name, until_s) for name in left_out if name not in self.running)

    def _deferred(self, now_s: float) -> set[str]:
        """Return the members to leave out; temporary deferrals do not count while no member trains."""
        return {
            name
            for name, until_s in self._deferred_until_s.items()
            if until_s > now_s and (self.running or until_s == math.inf)
        }

    def _stop(self, name: str, reason: str) -> None:
        self._rounds[self.running[name].round].reasons[name] = reason
        super()._stop(name, reason)

    def _start_pending(self, now_s: float) -> None:
        """Start one round with all whose GPUs are free, except members that are done or no longer fit."""
        parts: dict[bool, list[Allocation]] = {True: [], False: []}
        # Who leaves a seat still has its part of the GPU's memory.
        left_by = {self._shared_gpu(name) for name, running in self.running.items() if running.stopping}
        for allocation in self._pending:
            place = allocation.placement[0]
            is_ready = allocation.member not in self.running and self.pool.can_hold(allocation.placement)
            parts[is_ready and (place.node, place.gpus[0]) not in left_by].append(allocation)
        ready = parts[True]
        if not ready:
            return
        self._pending = parts[False]
        left = self._observer.left(now_s)
        # While GPUs were waited for, time has passed, and a member may have converged.
        starting = [a for a in ready if a.member in left and self._fits(left, a, now_s)]
        self._changed |= len(starting) < len(ready)
        if starting and (limit := self._observer.used_up()):
            self._end(limit, now_s)
        elif starting:
            self._open_round(self._with_companions(starting, left, now_s), left, now_s)

    def _with_companions(
        self, starting: Sequence[Allocation], left: Mapping[str, Workload], now_s: float
    ) -> list[Allocation]:
        """Add waiting members of the shapes of those that start on one GPU, which is then shared."""
        groups = {}
        for allocation in starting:
            (place, *_), shape = allocation.placement, self._shape_of(allocation.member, left)
            is_free = self.pool.can_hold((replace(place, seat=0),))
            if shape and allocation.gpus == 1 and not allocation.beside and is_free:
                groups[allocation.member] = FusedGroup(shape, self.pool.nodes[place.node], place.gpus[0])
        given = {allocation.member for allocation in starting}
        joined = self._companions(list(groups.values()), given, left, now_s)
        shared = {(place.node, place.gpus[0]) for a in joined for place in a.placement}
        fused = {name for name, group in groups.items() if (group.node.name, group.gpu) in shared}
        started = [_hosting(each) if each.member in fused else each for each in starting]
        return self._paced([*started, *joined], left)

    def _join_fused(self, now_s: float) -> None:
        """Start waiting members beside fused ones of their shapes, as a round of their own."""
        if not self._may_join:
            return
        self._may_join = False
        groups: dict[tuple[str, int], FusedGroup] = {}
        fused = [one for one in self.running.items() if one[1].task.allocation.mode == FUSED]
        left = self._observer.left(now_s) if fused else {}
        for name, running in fused:
            gpu, shape = self._shared_gpu(name), self._shape_of(name, left)
            if gpu and shape and not running.stopping and gpu[0] in self.pool.nodes:
                groups.setdefault(gpu, FusedGroup(shape, self.pool.nodes[gpu[0]], gpu[1], set()))
        for running in self.running.values():
            place = running.task.allocation.placement[0]
            if place.seat and (group := groups.get((place.node, place.gpus[0]))):
                group.seats.add(place.seat)
        if joined := self._companions(list(groups.values()), set(), left, now_s):
            self._open_round(self._paced(joined, left), left, now_s)

    def _paced(self, starting: Sequence[Allocation], left: Mapping[str, Workload]) -> list[Allocation]:
        """Return allocations, those of fused members with the rate that each has beside the others there."""
        running = (one.task.allocation for one in self.running.values())
        held = Counter((a.placement[0].node, a.placement[0].gpus[0]) for a in (*running, *starting))

        def rate(given: Allocation) -> float:
            place = given.placement[0]
            members = held[place.node, place.gpus[0]]
            return given.rate * left[given.member].fused_gain(members) / members

        return [replace(a, rate=rate(a)) if a.mode == FUSED else a for a in starting]

    def _companions(
        self, groups: Sequence[FusedGroup], given: Set[str], left: Mapping[str, Workload], now_s: float
    ) -> list[Allocation]:
        if not groups:
            return []
        taken = {*given, *self.running, *(allocation.member for allocation in self._pending)}
        # The observer may not know yet of those that start now: all count as waiting there.
        waiting = self._observer.seen(now_s, {}, self._deferred(now_s)).waiting
        free = [workload for workload in _with_least_gpus(waiting) if workload.name not in taken]
        return [a for a in companions(groups, free, self._alone) if self._fits(left, a, now_s)]

    def _shape_of(self, name: str, left: Mapping[str, Workload]) -> str:
        return left[name].fuses if name in left and name not in self._alone else ""

    def _shared_gpu(self, name: str) -> tuple[str, int] | None:
        """Return the GPU that a member in training shares; None if it shares none."""
        running = self.running.get(name)
        place = running.task.allocation.placement[0] if running else None
        return (place.node, place.gpus[0]) if place and place.seat else None

    def _leave_alone(self, name: str) -> None:
        """Let a member train alone from now on; so does the one that it leaves behind, if it is only one."""
        gpu = self._shared_gpu(name)
        others = [other for other in self.running if other != name and self._shared_gpu(other) == gpu]
        self._alone |= {name, *(others if len(others) == 1 else ())}

    def _without_fused(self) -> tuple[Node, ...]:
        """Return the nodes of the job without the GPUs of fused members."""
        fused = {
            self._shared_gpu(name)
            for name, running in self.running.items()
            if running.task.allocation.mode == FUSED
        }
        if not fused:
            return tuple(self.pool.nodes.values())
        return tuple(
            replace(node, gpus=tuple(gpu for gpu in node.gpus if (node.name, gpu) not in fused))
            for node in self.pool.nodes.values()
        )

    def _open_round(
        self, allocations: Sequence[Allocation], left: Mapping[str, Workload], now_s: float
    ) -> None:
        number, self._next_round = self._next_round, self._next_round + 1
        held = {allocation.member: allocation.gpus for allocation in allocations}
        gpus = {(place.node, gpu) for a in allocations for place in a.placement for gpu in place.gpus}
        self._rounds[number] = OpenRound(len(gpus), held, set(held))
        tasks = tuple(Task(allocation) for allocation in allocations)
        for task in tasks:
            self._run(task, number, self._start_s(now_s))
            spread = left[task.name].spread.get(task.allocation.gpus, 0.0)
            self.running[task.name].is_guess = spread > 0
        ends = [(task_s(left[a.member], a.rate), a.gpus) for a in allocations]
        self._commands.append(Start(number, tasks, round_s(ends, self._alpha), self._planner_state))
        self._fresh = False

    def _next_s(self, now_s: float) -> float:
        if self.ending:
            return math.inf
        if now_s < self._launch_from_s:
            return self._launch_from_s
        return min(self._replan_at_s, max(self._plan_from_s, now_s) if self._is_planning_due() else math.inf)


def _hosting(allocation: Allocation) -> Allocation:
    """Return the allocation of a member that others join."""
    place = replace(allocation.placement[0], seat=1)
    return replace(allocation, mode=FUSED, placement=(place,), alone=False)


def _with_least_gpus(workloads: Sequence[Workload]) -> Sequence[Workload]:
    """Return the members, those without any known rate on their least number of GPUs only.

    Their rate is known some seconds after they begin there, and until then a plan has nothing to go by.
    """
    if isinstance(workloads, WaitingQueue) and not workloads.guesses:
        return workloads
    return [_on_least(workload) if workload.is_guess else workload for workload in workloads]


def _on_least(workload: Workload) -> Workload:
    return replace(workload, rates={workload.min_gpus: workload.least_rate})


def should_stop(
    active: Mapping[str, int],
    allocated: int,
    alpha: float,
    *,
    waiting: bool,
    max_gpus: Mapping[str, int],
) -> bool:
    """Return true if all training of a round has to stop (FLEET, section 4.3.2, "Training").

    The paper stops a flotilla as soon as fewer than alpha * M GPUs are still held. There are two
    differences. M is the number of GPUs given to this round, not the whole cluster: a round that cannot
    fill the cluster would otherwise stop at once. And the round continues if a new plan could change
    nothing, because no member waits and each one holds all the GPUs it may.

    Parameters
    ----------
    active : mapping of str to int
        GPUs by member, for the members of the round that have neither converged nor failed; one that left
        because its next epoch would not fit before the limit still counts.
    allocated : int
        GPUs that the round was given when it started.
    waiting : bool
        True if members outside the round still need training.
    max_gpus : mapping of str to int
        Largest number of GPUs that each active member may hold.
    """
    if not active or sum(active.values()) >= alpha * allocated:
        return False
    return waiting or any(gpus < max_gpus[member] for member, gpus in active.items())


def round_s(tasks: Sequence[tuple[float, int]], alpha: float) -> float:
    """Return the seconds until less than the share `alpha` of a round's GPUs is active.

    Parameters
    ----------
    tasks : sequence of (seconds, GPUs)
        Seconds and GPUs of each member's task.
    """
    active = sum(gpus for _, gpus in tasks)
    least = alpha * active
    for seconds, gpus in sorted(tasks):
        active -= gpus
        if active < least or active == 0:
            return seconds
    return 0.0
