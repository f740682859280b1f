"""The job driver's loop under a virtual clock: events, and what a planner makes of them."""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from hetctl.control.flotilla import should_stop
from hetctl.core.errors import InfeasibleError
from hetctl.core.plan import Allocation
from hetctl.core.profile import Candidate
from hetctl.perf.course import PART_SHARE, least_step_s
from hetctl.planners.base import Decision, Held, Options, Planner, Request, ask
from hetctl.simulator.machine import Machine
from hetctl.simulator.queue import WaitingQueue
from hetctl.simulator.step import Step, begin, lost, paced, stopped
from hetctl.simulator.world import Arrival, Clock, World

Observer = Callable[[Request, Decision], None]
SOON_S = 1e-3
"""A planner cannot ask to be asked again sooner."""


class Event(IntEnum):
    """What may happen; of those at the same time the first one here comes first."""

    STEP_ENDS = 0
    NODE_FAILS = 1
    NODE_RETURNS = 2


@dataclass
class Flotilla:
    """The members of one round.

    Parameters
    ----------
    allocated : int
        GPUs that the round was given.
    held : dict
        GPUs by member, of those that have neither converged nor failed.
    steps : set of int
        Those that still run.
    """

    allocated: int = 0
    held: dict[str, int] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    stopped: bool = False


class Engine:
    """A run at `now` seconds: what runs, what is free and who waits.

    After `run`, `steps` holds every step in the order of their starts, and `planning_s` the seconds
    that the planner took for each decision.
    """

    def __init__(
        self,
        planner: Planner,
        arrivals: Iterable[Arrival],
        world: World,
        options: Options,
        observer: Observer | None = None,
    ) -> None:
        self.steps: list[Step] = []
        self.planning_s: list[float] = []
        self._planner, self._world, self._options, self._observer = planner, world, options, observer
        self._clock = world.clock
        self._longest_s = PART_SHARE * world.clock.usable_s
        self._alpha = planner.stop_share(options)
        self._machine = Machine(world.cluster)
        self._arrivals = deque(sorted(arrivals, key=lambda arrival: arrival.at_s))
        self._waiting = WaitingQueue(planner, options)
        self._left: dict[str, Candidate] = {}
        self._running: dict[str, int] = {}
        self._leaving: set[int] = set()
        self._pending: list[Allocation] = []
        self._flotillas: dict[int, Flotilla] = {}
        self._rounds = 0
        self._events: list[tuple[float, Event, int, str]] = []
        self._memory: object = None
        self._again_s = math.inf
        self._changed = True
        self._random = random.Random(world.failures.seed if world.failures else 0)
        for node in world.cluster.nodes:
            self._schedule_failure(node.name, 0.0)
        self._open_job(0.0)

    def run(self) -> Engine:
        """Go on until every member has converged.

        Raises
        ------
        InfeasibleError
            If a job is too short for some member to get anything done.
        """
        self._welcome()
        while self._left or self._arrivals:
            self._start_round()
            if self._running or not self._left or self._machine.any_down:
                self._go_on()
            else:
                self._start_job()
        return self

    def _open_job(self, now: float) -> None:
        self.now, self._deadline = now, now + self._clock.usable_s
        self._fresh = self._changed = True
        self._resting: set[str] = set()
        self._refused = ("", 0.0)

    def _start_job(self) -> None:
        """Go on to the next job, since nothing fits the rest of this one."""
        if self._fresh:
            raise _too_short(self._clock, *self._refused)
        self._open_job(self.now + self._clock.job_overhead_s)

    def _start_round(self) -> None:
        """Start whose GPUs have become free; ask the planner when nobody waits for that."""
        if not self._pending and self._changed and self._may_plan():
            self._changed = False
            self._decide()
        if self._pending:
            self._start_pending()

    def _may_plan(self) -> bool:
        paradigm = self._planner.paradigm
        if paradigm == "elastic":
            return True
        if not self._waiting.candidates or not self._machine.any_free:
            return False
        return paradigm == "local" or not self._running

    def _decide(self) -> None:
        request = self._request()
        if not request.held and not (request.candidates and request.nodes):
            return
        began = time.perf_counter()
        decision, left_out = ask(self._planner, request, self._fits)
        self.planning_s.append(time.perf_counter() - began)
        if self._observer:
            self._observer(request, decision)
        self._resting.update(left_out)
        self._memory = decision.memory
        self._again_s = math.inf if decision.again_s is None else max(decision.again_s, self.now + SOON_S)
        self._pending = list(decision.start)
        for name in (*decision.stop, *(allocation.member for allocation in decision.start)):
            if name in self._running:
                self._stop(self._running[name])

    def _request(self) -> Request:
        candidates = self._waiting.without(self._resting)
        held = self._held() if self._planner.paradigm == "elastic" else ()
        if self._world.seen is not None:
            candidates, held = self._as_seen(self._world.seen, candidates, held)
        return Request(
            candidates=candidates,
            nodes=self._machine.free,
            gpus=self._machine.gpus,
            round_index=self._rounds,
            options=self._options,
            held=held,
            cluster=self._machine.up,
            now_s=self.now,
            memory=self._memory,
        )

    def _held(self) -> tuple[Held, ...]:
        steps = (self.steps[index] for index in self._running.values() if index not in self._leaving)
        return tuple(Held(self._as_of_now(s.candidate.name), s.allocation, s.start_s) for s in steps)

    def _as_of_now(self, name: str) -> Candidate:
        if name not in self._running:
            return self._left[name]
        step = self.steps[self._running[name]]
        return step.candidate.interrupted(step.left_at(self.now))

    def _as_seen(
        self, seen: Callable[..., Sequence[Candidate]], waiting: Sequence[Candidate], held: tuple[Held, ...]
    ) -> tuple[Sequence[Candidate], tuple[Held, ...]]:
        known = seen([*waiting, *(h.candidate for h in held)])
        in_training = zip(known[len(waiting) :], held, strict=True)
        return known[: len(waiting)], tuple(
            Held(candidate, h.allocation, h.since_s) for candidate, h in in_training
        )

    def _fits(self, allocation: Allocation) -> bool:
        if self._deadline == math.inf:
            return True
        candidate = self._as_of_now(allocation.member)
        if begin(candidate, allocation, 0, self._next_start_s(), self._deadline, self._longest_s):
            return True
        self._refused = (candidate.name, least_step_s(candidate, allocation.rate, self._longest_s))
        return False

    def _next_start_s(self) -> float:
        return self.now if self._fresh else self.now + self._clock.round_overhead_s

    def _start_pending(self) -> None:
        """Start, as one round, all that were given GPUs which are free by now."""
        ready: list[Allocation] = []
        waiting: list[Allocation] = []
        for allocation in self._pending:
            if allocation.member not in self._left:
                continue
            free = allocation.member not in self._running and self._machine.can_hold(allocation)
            (ready if free else waiting).append(allocation)
        self._pending = waiting
        if not ready:
            return
        start_s = self._next_start_s()
        for group in self._groups(ready):
            self._start_group(group, start_s)

    def _groups(self, allocations: list[Allocation]) -> Iterable[list[Allocation]]:
        """Return who trains together: those on one type of GPU, unless types may be mixed."""
        if not self._planner.shares or self._options.mix_types:
            return [allocations]
        groups: dict[str | None, list[Allocation]] = {}
        for allocation in allocations:
            groups.setdefault(self._machine.type_of(allocation), []).append(allocation)
        return groups.values()

    def _start_group(self, group: list[Allocation], start_s: float) -> None:
        flotilla = Flotilla()
        rate = min(a.rate for a in group) if self._planner.shares and self._world.lockstep else None
        for allocation in group:
            candidate = self._left[allocation.member]
            step = begin(candidate, allocation, self._rounds, start_s, self._deadline, self._longest_s, rate)
            if step is not None:
                self._start(step, flotilla)
        if flotilla.steps:
            self._flotillas[self._rounds] = flotilla
            self._rounds += 1
            self._fresh = False

    def _start(self, step: Step, flotilla: Flotilla) -> None:
        allocation = step.allocation
        self._machine.take(allocation)
        self._waiting.remove(step.candidate.name)
        index = self._running[allocation.member] = len(self.steps)
        self.steps.append(step)
        flotilla.allocated += allocation.gpus
        flotilla.held[allocation.member] = allocation.gpus
        flotilla.steps.add(index)
        self._expect(index)

    def _expect(self, index: int) -> None:
        heapq.heappush(self._events, (self.steps[index].end_s, Event.STEP_ENDS, index, ""))

    def _is_stale(self, event: tuple[float, Event, int, str]) -> bool:
        at_s, kind, index, _ = event
        if kind != Event.STEP_ENDS:
            return False
        step = self.steps[index]
        return step.end_s != at_s or self._running.get(step.candidate.name) != index

    def _go_on(self) -> None:
        """Go on to when the next thing happens, and let all happen that happens then."""
        while self._events and self._is_stale(self._events[0]):
            heapq.heappop(self._events)
        idle = not self._running
        next_event_s = self._events[0][0] if self._events else math.inf
        next_arrival_s = self._arrivals[0].at_s if self._arrivals else math.inf
        self.now = max(min(next_event_s, next_arrival_s, self._again_s), self.now)
        self._changed = True
        if self._again_s <= self.now:
            self._again_s = math.inf
        touched = set()
        while self._events and self._events[0][0] <= self.now:
            event = heapq.heappop(self._events)
            if not self._is_stale(event):
                touched.update(self._happen(*event[1:]))
        self._welcome()
        for round_index in touched:
            self._look_after(round_index)
        if idle and self._clock.wall_s is not None:
            self._open_job(self.now)

    def _happen(self, kind: Event, index: int, node: str) -> set[int]:
        """Let one event happen; return the rounds that it changed."""
        if kind == Event.STEP_ENDS:
            step = self.steps[index]
            self._end(index)
            return {step.round_index}
        if kind == Event.NODE_FAILS:
            return self._fail(node)
        self._machine.repair(node)
        return set()

    def _end(self, index: int) -> None:
        step = self.steps[index]
        name = step.allocation.member
        self._machine.release(step.allocation)
        del self._running[name]
        self._leaving.discard(index)
        flotilla = self._flotillas[step.round_index]
        flotilla.steps.discard(index)
        if step.converged:
            del self._left[name], flotilla.held[name]
        else:
            self._left[name] = step.candidate.interrupted(step.samples_left)
            self._waiting.add(self._left[name])

    def _fail(self, node: str) -> set[int]:
        failures = self._world.failures
        assert failures is not None
        self._machine.fail(node)
        self._pending = []
        touched = set()
        for name, index in list(self._running.items()):
            step = self.steps[index]
            if any(part.node == node for part in step.allocation.placement):
                self.steps[index] = lost(step, self.now, failures.checkpoint_every_s)
                self._end(index)
                self._flotillas[step.round_index].held.pop(name, None)
                touched.add(step.round_index)
        returns_s = self.now + failures.repair_s
        heapq.heappush(self._events, (returns_s, Event.NODE_RETURNS, 0, node))
        self._schedule_failure(node, returns_s)
        return touched

    def _schedule_failure(self, node: str, up_s: float) -> None:
        if self._world.failures is not None:
            fails_s = up_s + self._random.expovariate(1 / self._world.failures.node_mtbf_s)
            heapq.heappush(self._events, (fails_s, Event.NODE_FAILS, 0, node))

    def _welcome(self) -> None:
        while self._arrivals and self._arrivals[0].at_s <= self.now:
            candidate = self._arrivals.popleft().candidate
            self._left[candidate.name] = candidate
            self._waiting.add(candidate)

    def _look_after(self, round_index: int) -> None:
        """After members left a round: stop it if too few GPUs are active, else set the pace anew."""
        flotilla = self._flotillas[round_index]
        if not flotilla.steps:
            del self._flotillas[round_index]
        elif not self._planner.shares:
            return
        elif self._should_stop(flotilla):
            flotilla.stopped = True
            for index in flotilla.steps:
                self._stop(index)
        elif self._world.lockstep and not flotilla.stopped:
            self._set_pace(flotilla)

    def _should_stop(self, flotilla: Flotilla) -> bool:
        return (
            self._alpha > 0
            and not flotilla.stopped
            and should_stop(
                flotilla.held,
                flotilla.allocated,
                self._alpha,
                waiting=len(self._left) > len(flotilla.held),
                max_gpus={name: self._left[name].max_gpus for name in flotilla.held},
            )
        )

    def _set_pace(self, flotilla: Flotilla) -> None:
        rate = min(self.steps[index].allocation.rate for index in flotilla.steps)
        for index in flotilla.steps:
            if self.steps[index].rate != rate and index not in self._leaving:
                self.steps[index] = paced(self.steps[index], self.now, rate, self._deadline, self._longest_s)
                self._expect(index)

    def _stop(self, index: int) -> None:
        self._leaving.add(index)
        self.steps[index] = stopped(self.steps[index], self.now)
        self._expect(index)


def _too_short(clock: Clock, member: str, needed_s: float) -> InfeasibleError:
    wall_s = math.floor(clock.wall_s or 0.0)
    return InfeasibleError(
        f"round limit {_limit(wall_s)} is shorter than start-up, checkpoint and grace of {member}"
        f" ({_duration(needed_s + clock.grace_s)}); raise --time",
        hint="an epoch need not fit: a longer one is trained in parts",
    )


def _limit(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{minutes // 60}:{minutes % 60:02}" + (f":{rest:02}" if rest else "")


def _duration(seconds: float) -> str:
    return f"{math.ceil(seconds)} s" if seconds < 120 else f"{math.ceil(seconds / 60)} min"
