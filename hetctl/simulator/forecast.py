"""What a plan comes to: the job driver's rounds and jobs, replayed under a virtual clock."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from hetctl.control.flotilla import should_stop
from hetctl.core.errors import InfeasibleError
from hetctl.core.plan import Allocation, Forecast, Plan, Round
from hetctl.core.profile import Candidate
from hetctl.core.site import Cluster, Node
from hetctl.perf.bounds import fluid_bound
from hetctl.perf.course import least_step_s
from hetctl.planners.base import Options, Planner, Request, ask
from hetctl.simulator.step import Step, begin, stopped


@dataclass(frozen=True)
class Clock:
    """What time a job has, and what goes by without training.

    Parameters
    ----------
    wall_s : float or None
        Wall-clock limit of a job; None: one job without a limit.
    grace_s : float
        All training of a job is over this long before its limit.
    round_overhead_s : float
        From the end of steps to the start of the next ones in the same job.
    job_overhead_s : float
        From the end of a job to the start of the next one.
    """

    wall_s: float | None
    grace_s: float
    round_overhead_s: float
    job_overhead_s: float

    @property
    def usable_s(self) -> float:
        """Seconds of a job in which members can train."""
        return math.inf if self.wall_s is None else self.wall_s - self.grace_s


def forecast(
    planner: Planner,
    candidates: Sequence[Candidate],
    cluster: Cluster,
    options: Options,
    *,
    wall_s: float | None,
    grace_s: float,
    round_overhead_s: float,
    job_overhead_s: float,
    objective: str = "makespan",
) -> Plan:
    """Predict every round until all candidates have converged, and how long they take.

    A member converges when its samples are done. In the global paradigm a round ends when all of its
    steps have; in the local one rounds overlap, one for each time that freed GPUs were given away.

    Raises
    ------
    InfeasibleError
        If the cluster has no GPU, or a job is too short for an epoch of some member.
    """
    if cluster.gpus == 0:
        raise InfeasibleError("the cluster has no GPU", hint="raise --gpus")
    clock = Clock(wall_s, grace_s, round_overhead_s, job_overhead_s)
    steps = replay(planner, candidates, cluster, options, clock)
    makespan_s = max((step.end_s for step in steps), default=0.0)
    lower_bound_s = fluid_bound(candidates, cluster.gpus)
    return Plan(
        planner=planner.name,
        objective=objective,
        gpus=cluster.gpus,
        gpus_per_node=cluster.gpus_per_node,
        predicted_makespan_s=makespan_s,
        lower_bound_s=lower_bound_s,
        ratio=makespan_s / lower_bound_s if lower_bound_s else 1.0,
        rounds=_rounds(steps),
        members=_members(candidates, steps),
        options=asdict(options),
    )


def replay(
    planner: Planner, candidates: Sequence[Candidate], cluster: Cluster, options: Options, clock: Clock
) -> tuple[Step, ...]:
    """Return every step until all candidates have converged, by round and in the planner's order.

    Raises
    ------
    InfeasibleError
        If a job is too short for an epoch of some member.
    """
    driver = _Driver(planner, candidates, cluster, options, clock)
    while driver.left:
        driver.start_round()
        if driver.running:
            driver.next_end()
        else:
            driver.start_job()
    return tuple(driver.steps)


class _Driver:
    """The job driver at `now` seconds: what runs, what is free and who waits."""

    def __init__(
        self,
        planner: Planner,
        candidates: Sequence[Candidate],
        cluster: Cluster,
        options: Options,
        clock: Clock,
    ) -> None:
        self.planner, self.options, self.clock = planner, options, clock
        self.gpus = cluster.gpus
        self.left = {candidate.name: candidate for candidate in candidates}
        self.max_gpus = {candidate.name: candidate.max_gpus for candidate in candidates}
        self.free = {node.name: set(node.gpus) for node in cluster.nodes}
        self.steps: list[Step] = []
        self.rounds = 0
        self.running: dict[str, int] = {}
        self.ends: list[tuple[float, int]] = []
        self.unreleased: dict[str, int] = {}
        self.allocated = 0
        self._open_job(0.0)

    def start_round(self) -> None:
        """Give away what is free, if the paradigm allows it now and anybody can use it."""
        if self.running and self.planner.paradigm == "global":
            return
        request = self._request()
        if not request.candidates or not request.nodes:
            return
        start_s = self.now if self.fresh else self.now + self.clock.round_overhead_s
        allocations, left_out = ask(
            self.planner, request, lambda given: self._step(given, start_s) is not None
        )
        self.resting.update(left_out)
        for allocation in allocations:
            self._start(self._step(allocation, start_s))
        if allocations:
            self._open_round()

    def next_end(self) -> None:
        """Go on to where the next steps end, and stop the others if too few GPUs are active."""
        self.now = self.ends[0][0]
        converged = False
        while self.ends and self.ends[0][0] <= self.now:
            converged |= self._end(self.steps[heapq.heappop(self.ends)[1]])
        if converged and self._should_stop():
            self._stop()

    def start_job(self) -> None:
        """Go on to the next job, since nothing fits the rest of this one."""
        if self.fresh:
            raise _too_short(self.clock, *self.refused)
        self._open_job(self.now + self.clock.job_overhead_s)

    def _open_job(self, now: float) -> None:
        self.now, self.deadline = now, now + self.clock.usable_s
        self.fresh = True
        self.resting: set[str] = set()
        self.refused = ("", 0.0)

    def _open_round(self) -> None:
        held = [self.steps[index].allocation for index in self.running.values()]
        self.unreleased = {allocation.member: allocation.gpus for allocation in held}
        self.allocated = sum(self.unreleased.values())
        self.rounds += 1
        self.fresh = self.stopping = False

    def _request(self) -> Request:
        busy = self.running.keys() | self.resting
        return Request(
            candidates=tuple(c for name, c in self.left.items() if name not in busy),
            nodes=tuple(Node(name, tuple(sorted(gpus))) for name, gpus in self.free.items() if gpus),
            gpus=self.gpus,
            round_index=self.rounds,
            options=self.options,
        )

    def _step(self, allocation: Allocation, start_s: float) -> Step | None:
        candidate = self.left[allocation.member]
        step = begin(candidate, allocation, self.rounds, start_s, self.deadline)
        if step is None:
            self.refused = (candidate.name, least_step_s(candidate, allocation.rate))
        return step

    def _start(self, step: Step | None) -> None:
        assert step is not None
        for part in step.allocation.placement:
            self.free[part.node].difference_update(part.gpus)
        self.running[step.allocation.member] = len(self.steps)
        heapq.heappush(self.ends, (step.end_s, len(self.steps)))
        self.steps.append(step)

    def _end(self, step: Step) -> bool:
        name = step.allocation.member
        for part in step.allocation.placement:
            self.free[part.node].update(part.gpus)
        del self.running[name]
        if step.converged:
            del self.left[name], self.unreleased[name]
        else:
            self.left[name] = replace(step.candidate, samples_left=step.samples_left)
        return step.converged

    def _should_stop(self) -> bool:
        return (
            self.planner.shares
            and not self.stopping
            and should_stop(
                self.unreleased,
                self.allocated,
                self.options.alpha,
                waiting=len(self.left) > len(self.unreleased),
                max_gpus=self.max_gpus,
            )
        )

    def _stop(self) -> None:
        self.stopping = True
        for index in self.running.values():
            self.steps[index] = stopped(self.steps[index], self.now)
        self.ends = [(self.steps[index].end_s, index) for index in self.running.values()]
        heapq.heapify(self.ends)


def _rounds(steps: Sequence[Step]) -> tuple[Round, ...]:
    by_round: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        by_round[step.round_index].append(step)
    return tuple(
        Round(
            index=index,
            predicted_s=max(step.end_s for step in those) - those[0].start_s,
            allocations=tuple(step.allocation for step in those),
            start_s=those[0].start_s,
        )
        for index, those in by_round.items()
    )


def _members(candidates: Sequence[Candidate], steps: Sequence[Step]) -> tuple[Forecast, ...]:
    done_s: dict[str, float] = {}
    training_s: dict[str, float] = defaultdict(float)
    for step in steps:
        done_s[step.candidate.name] = step.end_s
        training_s[step.candidate.name] += step.end_s - step.start_s
    return tuple(Forecast(c.name, done_s[c.name], training_s[c.name]) for c in candidates)


def _too_short(clock: Clock, member: str, needed_s: float) -> InfeasibleError:
    wall_s = math.floor(clock.wall_s or 0.0)
    return InfeasibleError(
        f"round limit {_limit(wall_s)} is shorter than one epoch of {member}"
        f" ({_duration(needed_s + clock.grace_s)}); raise --time",
        hint=f"start-up and the grace of {_duration(clock.grace_s)} before the limit are counted",
    )


def _limit(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{minutes // 60}:{minutes % 60:02}" + (f":{rest:02}" if rest else "")


def _duration(seconds: float) -> str:
    return f"{math.ceil(seconds)} s" if seconds < 120 else f"{math.ceil(seconds / 60)} min"
