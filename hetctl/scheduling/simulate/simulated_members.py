"""Members of a simulated run: those to train, those in training, and the view of the planner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

from hetctl.model.workload import Workload
from hetctl.scheduling.job_scheduler import ObservedMembers, RunningTask
from hetctl.scheduling.planners.base import Options, Planner, RunningMember, WaitingQueue
from hetctl.scheduling.simulate.rate_learner import RateLearner
from hetctl.scheduling.simulate.scenario import WorkEstimate
from hetctl.scheduling.simulate.simulated_task import SimulatedTask, samples_left_after_failure


class SimulatedMembers:
    """Members of a simulated run, and their tasks (`hetctl.scheduling.job_scheduler.Observer`).

    Parameters
    ----------
    work_estimator, rate_learner
        Same as in `Scenario`.

    Attributes
    ----------
    unfinished : dict of str to Workload
        Members that have not converged, as they were when their last tasks ended.
    tasks : list of SimulatedTask
        All tasks in the order of their starts.
    running : dict of str to int
        Numbers of the tasks that have not ended, by member.
    """

    def __init__(
        self,
        planner: Planner,
        options: Options,
        work_estimator: WorkEstimate | None,
        rate_learner: RateLearner | None = None,
    ) -> None:
        self.unfinished: dict[str, Workload] = {}
        self.tasks: list[SimulatedTask] = []
        self.running: dict[str, int] = {}
        self._is_elastic, self._work_estimator = planner.paradigm == "elastic", work_estimator
        self._rate_learner = rate_learner
        self._order = lambda workload: planner.order(workload, options)
        self._waiting = WaitingQueue(self._order)

    def add(self, workload: Workload) -> None:
        """Add a member that waits for GPUs."""
        if workload.spread:
            # A simulation takes expected rates for the true ones: there is nothing to try.
            workload = replace(workload, spread={})
        self.unfinished[workload.name] = workload
        self._waiting.add(workload)

    def begin(self, task: SimulatedTask) -> int:
        """Start a member's task; return its number."""
        self._waiting.drop(task.workload.name)
        self.running[task.workload.name] = len(self.tasks)
        self.tasks.append(task)
        return len(self.tasks) - 1

    def end(self, index: int) -> SimulatedTask:
        """End a task, let its member wait if it has not converged, and return the task."""
        task = self.tasks[index]
        del self.running[task.workload.name]
        if task.converged:
            del self.unfinished[task.workload.name]
        else:
            self.add(task.workload.interrupted(task.samples_left))
        return task

    def left(self, now_s: float) -> Mapping[str, Workload]:
        """Return members that have not converged, with the work left after their finished epochs."""
        return _Left(self, now_s)

    def seen(self, now_s: float, running: Mapping[str, RunningTask], deferred: Set[str]) -> ObservedMembers:
        """Return all members as a planner sees them; only an elastic one sees those in training."""
        waiting = self._waiting.without(deferred)
        held = [
            RunningMember(self._as_of_now(name, now_s), one.task.allocation, one.since_s)
            for name, one in (running.items() if self._is_elastic else ())
            if not one.stopping
        ]
        if self._work_estimator is not None:
            known = self._work_estimator([*waiting, *(h.workload for h in held)])
            waiting, in_training = known[: len(waiting)], known[len(waiting) :]
            held = [replace(h, workload=c) for h, c in zip(held, in_training, strict=True)]
        if self._rate_learner is not None:
            waiting = sorted(map(self._rate_learner.seen, waiting), key=self._order)
            held = [replace(h, workload=self._rate_learner.seen(h.workload)) for h in held]
        return ObservedMembers(_Left(self, now_s), waiting, tuple(held))

    def used_up(self) -> str | None:
        """Return None: a simulated run has no budget."""
        return None

    def _as_of_now(self, name: str, now_s: float) -> Workload:
        task = self.tasks[self.running[name]]
        return task.workload.interrupted(task.left_at(now_s))

    def as_finished(self, name: str, now_s: float) -> Workload:
        """Return a member with the work left after its finished epochs."""
        workload = self.unfinished[name]
        if name in self.running:
            task = self.tasks[self.running[name]]
            workload = task.workload.interrupted(samples_left_after_failure(task, now_s))
        return workload if self._rate_learner is None else self._rate_learner.seen(workload)


class _Left(Mapping[str, Workload]):
    """Mapping of `SimulatedMembers.left` that computes only the entries that are read."""

    def __init__(self, members: SimulatedMembers, now_s: float) -> None:
        self._members, self._now_s = members, now_s

    def __getitem__(self, name: str) -> Workload:
        return self._members.as_finished(name, self._now_s)

    def __contains__(self, name: object) -> bool:
        return name in self._members.unfinished

    def __iter__(self) -> Iterator[str]:
        return iter(self._members.unfinished)

    def __len__(self) -> int:
        return len(self._members.unfinished)
