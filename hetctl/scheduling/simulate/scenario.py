"""Conditions of a simulated run: time limits, failures, and the information of planners."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field

from hetctl.model.site import Cluster
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload
from hetctl.scheduling.simulate.rate_learner import RateLearner

Successors = Callable[[str, float, float], Iterable[Workload]]
"""Function from a member that is done, and the seconds and GPU-seconds so far, to the members that follow it.

A member may follow itself, with more work."""
WorkEstimate = Callable[[Sequence[Workload]], Sequence[Workload]]
"""Function from members with their true work to those that a planner sees, in the same order."""


@dataclass(frozen=True)
class JobTiming:
    """Time limits of a job, and times without training.

    Parameters
    ----------
    wall_s : float or None
        Wall-clock limit of a job in seconds; None: one job without a limit.
    grace_s : float
        Time before the limit by which all training of a job has ended, in seconds.
    round_overhead_s : float
        Time from the end of tasks to the start of the next ones in the same job, in seconds.
    job_overhead_s : float
        Time from the end of a job to the start of the next one, in seconds.
    job_start_s : float
        Time from the start of a job until its first members start, in seconds.
    """

    wall_s: float | None = None
    grace_s: float = 0.0
    round_overhead_s: float = 0.0
    job_overhead_s: float = 0.0
    job_start_s: float = 0.0

    @property
    def usable_s(self) -> float:
        """Seconds of a job in which members can train."""
        return math.inf if self.wall_s is None else self.wall_s - self.grace_s


@dataclass(frozen=True)
class Failures:
    """Independent failures of nodes, after exponentially distributed times.

    A failure on a member's node ends its task; as in the driver, the job continues on the other nodes.

    Parameters
    ----------
    node_mtbf_s : float
        Mean time between failures of a node, in seconds.
    repair_s : float
        Time in seconds after which a failed node is available again, for the jobs that begin then.
    checkpoint_every_s : float
        Seconds between checkpoints of members without known epochs; others write one after each epoch.
    """

    node_mtbf_s: float
    repair_s: float = 600.0
    checkpoint_every_s: float = 600.0
    seed: int = 0


@dataclass(frozen=True)
class Scenario:
    """Cluster and conditions under which the planners' decisions are carried out.

    Parameters
    ----------
    lockstep : bool
        True if members of a round that share their data all train at the slowest one's rate, on any type
        of GPU.
    work_estimator : callable or None
        Function that gives the members with the work that planners see; None: their true work.
    rate_learner : RateLearner or None
        State of the rates that planners see, for one run; None: planners see the true rates.
    """

    cluster: Cluster
    timing: JobTiming = field(default_factory=JobTiming)
    lockstep: bool = False
    failures: Failures | None = None
    work_estimator: WorkEstimate | None = None
    rate_learner: RateLearner | None = None


@dataclass(frozen=True)
class Arrival:
    """A member that needs training from `at_s` on."""

    workload: Workload
    at_s: float = 0.0


def jobs_of(arrivals: Iterable[Arrival]) -> list[tuple[float, Workload]]:
    """Return the arrival and the work of each member; if it follows itself, the work of all its parts."""
    jobs: dict[str, tuple[float, Workload]] = {}
    for arrival in arrivals:
        name = arrival.workload.name
        at_s, before = jobs.get(name, (arrival.at_s, arrival.workload.with_left(0.0)))
        jobs[name] = at_s, before.with_left(before.samples_left + arrival.workload.samples_left)
    return list(jobs.values())
