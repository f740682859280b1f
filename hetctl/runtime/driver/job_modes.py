"""Modes of training in a job, and the driver's part of each, which only jobs that need it import."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hetctl.model.interpreter import load_entry
from hetctl.model.plan import BALANCED, DATA_PARALLEL, HOPPER, PIPELINE
from hetctl.model.run import RunSpec
from hetctl.model.values import dataclass
from hetctl.runtime.driver.rank_pool import RankPool
from hetctl.runtime.driver.rounds import Rounds
from hetctl.runtime.driver.run_members import RunMembers, RunObserver
from hetctl.scheduling.job_scheduler import JobScheduler, RunningTask
from hetctl.scheduling.planners.base import Options, Planner
from hetctl.scheduling.round_scheduler import RoundScheduler
from hetctl.storage.event_files import EventQueue
from hetctl.storage.paths import RunFolder


@dataclass(frozen=True)
class JobContext:
    """Interface of a job to its modes.

    Parameters
    ----------
    planner : Planner
        Planner of the run.
    events : EventQueue
        Events of the driver.
    on_failure : callable
        Function called with the error if something cannot be written or launched; it ends the job unless the
        error may pass by itself.
    """

    folder: RunFolder
    spec: RunSpec
    planner: Planner
    options: Options
    rank_pool: RankPool
    members: RunMembers
    rounds: Rounds
    events: EventQueue
    on_failure: Callable[[OSError], None]

    @property
    def now_s(self) -> float:
        """Seconds since the start of the run."""
        return time.time() - self.members.began_at

    def observer(self, planner: Planner, *, pipelines: bool = False) -> RunObserver:
        """Return the observer of members that train as pipelines, or of all others."""
        piped = self.spec.pipelines
        return RunObserver(
            self.members,
            order=lambda workload: planner.order(workload, self.options),
            has=lambda name: (name in piped) is pipelines,
        )


class JobMode:
    """A mode of training in one job: the scheduling of its phase, and the driver's work for it.

    Attributes
    ----------
    executors : mapping of type to callable
        Functions that execute the mode's own commands, beside those of `hetctl.scheduling.commands`.
    """

    def __init__(self, job: JobContext) -> None:
        self.job = job
        self.executors: Mapping[type, Callable[[Any], None]] = {}

    def scheduler(self) -> JobScheduler:
        """Begin the mode's phase; return its scheduling."""
        raise NotImplementedError

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
        planner, options = self.job.planner, self.job.options
        return RoundScheduler(planner, options, self.job.observer(planner))


MODES: Mapping[str, str] = {
    PIPELINE: "hetctl.runtime.driver.pipeline_job:PipelineJob",
    HOPPER: "hetctl.runtime.driver.hop_job:HopJob",
    DATA_PARALLEL: "hetctl.runtime.driver.job_modes:DataParallelJob",
    BALANCED: "hetctl.runtime.driver.job_modes:DataParallelJob",
}
"""Subclasses of `JobMode` by mode, as ``module:class``."""


def modes_of(job: JobContext) -> list[JobMode]:
    """Return the modes of a job's phases, in their order."""
    return [load_entry(MODES[name])(job) for name in job.spec.phases]
