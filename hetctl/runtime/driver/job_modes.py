"""Modes of training in a job, and the driver's part of each, which only jobs that need it import."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from hetctl.model.interpreter import load_entry
from hetctl.model.plan import BALANCED, DATA_PARALLEL, HOPPER, PIPELINE
from hetctl.model.workload import Workload
from hetctl.runtime.driver.rounds import Rounds
from hetctl.scheduling.job_scheduler import JobScheduler, ObservedMembers, RunningTask
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import options_from
from hetctl.scheduling.round_scheduler import RoundScheduler


class JobMode:
    """A mode of training in one job: the scheduling of its phase, and the driver's work for it.

    The scheduling sees the phase's members by it (`hetctl.scheduling.job_scheduler.Observer`).

    Parameters
    ----------
    rounds : Rounds
        Rounds of the job, with its files, members and ranks.

    Attributes
    ----------
    planner, options
        Planner of the run, and its options.
    executors : mapping of type to callable
        Functions that execute the mode's own commands, beside those of `hetctl.scheduling.commands`.
    has_pipelines : bool
        True for the members that train as pipelines, false for all others.
    """

    has_pipelines = False

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.planner, self.options = planner_named(rounds.spec.planner), options_from(rounds.spec.options)
        self.executors: Mapping[type, Callable[[Any], None]] = {}

    def scheduler(self) -> JobScheduler:
        """Begin the mode's phase; return its scheduling."""
        raise NotImplementedError

    def left(self, _now_s: float) -> Mapping[str, Workload]:
        """Return all members of the phase that need training, after finished epochs and checkpoints."""
        piped, workloads = self.rounds.spec.pipelines, self.rounds.members.workloads()
        return {name: work for name, work in workloads.items() if (name in piped) is self.has_pipelines}

    def seen(self, now_s: float, running: Mapping[str, RunningTask], deferred: Set[str]) -> ObservedMembers:
        """Return all members; those that wait are in the planner's order, without `deferred`."""
        left = self.left(now_s)
        waiting = [work for name, work in left.items() if name not in running and name not in deferred]
        waiting.sort(key=lambda workload: self.planner.order(workload, self.options))
        held = tuple(self.rounds.members.members_in_training(running, time.time()))
        return ObservedMembers(left, waiting, held)

    def used_up(self) -> str | None:
        """Return the limit of the run's budget that is reached; None if none is."""
        return self.rounds.members.used_up()

    def reports(self) -> Iterable[Any]:
        """Return the events that agents and ranks have reported; the ends of tasks come later."""
        return ()

    def arrivals(self, *, some_ended: bool) -> Iterable[Any]:  # noqa: ARG002
        """Return the events after the ends of tasks, such as new trials of a search.

        Parameters
        ----------
        some_ended : bool
            True if tasks have ended since the last call.
        """
        return ()

    def on_task_ended(self, running: RunningTask, reason: str) -> None:
        """Record the end of a task of this mode, before the scheduling learns of it."""


class DataParallelJob(JobMode):
    """Rounds of groups by the run's planner."""

    def scheduler(self) -> RoundScheduler:
        """Return the scheduling by the run's planner."""
        return RoundScheduler(self.planner, self.options, self)


MODES: Mapping[str, str] = {
    PIPELINE: "hetctl.runtime.driver.pipeline_job:PipelineJob",
    HOPPER: "hetctl.runtime.driver.hop_job:HopJob",
    DATA_PARALLEL: "hetctl.runtime.driver.job_modes:DataParallelJob",
    BALANCED: "hetctl.runtime.driver.job_modes:DataParallelJob",
}
"""Subclasses of `JobMode` by mode, as ``module:class``."""


def modes_of(rounds: Rounds) -> list[JobMode]:
    """Return the modes of a job's phases, in their order."""
    return [load_entry(MODES[name])(rounds) for name in rounds.spec.phases]
