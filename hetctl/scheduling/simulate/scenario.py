"""What a simulated run has to live with: time limits, failures, what can be known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hetctl.model.site import Cluster
from hetctl.model.workload import Workload

WorkEstimate = Callable[[Sequence[Workload]], Sequence[Workload]]
"""From members as they are to members as a planner may know them, in the same order."""


@dataclass(frozen=True)
class JobTiming:
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

    wall_s: float | None = None
    grace_s: float = 0.0
    round_overhead_s: float = 0.0
    job_overhead_s: float = 0.0

    @property
    def usable_s(self) -> float:
        """Seconds of a job in which members can train."""
        return math.inf if self.wall_s is None else self.wall_s - self.grace_s


@dataclass(frozen=True)
class Failures:
    """How nodes fail: each for itself, after exponentially distributed times.

    A failure that a member notices ends the job, as it does for the driver.

    Parameters
    ----------
    node_mtbf_s : float
        Mean time of a node between failures.
    repair_s : float
        A failed node comes back after this time, for the jobs that begin then.
    checkpoint_every_s : float
        Members without known epochs write a checkpoint that often; others after each epoch.
    """

    node_mtbf_s: float
    repair_s: float = 600.0
    checkpoint_every_s: float = 600.0
    seed: int = 0


@dataclass(frozen=True)
class Scenario:
    """Where the planners' decisions are carried out.

    Parameters
    ----------
    lockstep : bool
        Whether members of a round that share their data all go at the slowest one's rate, on whatever type
        of GPU.
    seen : callable or None
        What planners know of the members; None: everything.
    """

    cluster: Cluster
    clock: JobTiming = field(default_factory=JobTiming)
    lockstep: bool = False
    failures: Failures | None = None
    seen: WorkEstimate | None = None


@dataclass(frozen=True)
class Arrival:
    """A member that needs training from `at_s` on."""

    workload: Workload
    at_s: float = 0.0
