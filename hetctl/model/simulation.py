"""Results of a simulated run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetctl.model.plan import Allocation, Forecast


@dataclass(frozen=True)
class Interval:
    """Time interval in which a member held a constant number of GPUs.

    Parameters
    ----------
    restart_s : float
        Seconds of the interval that were spent on restarting the member.
    samples : float
        Samples trained in the rest of the interval.
    """

    allocation: Allocation
    round_index: int
    start_s: float
    end_s: float
    restart_s: float
    samples: float

    @property
    def member(self) -> str:
        """Name of the member."""
        return self.allocation.member

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.allocation.gpus


@dataclass(frozen=True)
class Simulation:
    """Schedule of a run under a virtual clock, and its ratio to the lower bound.

    Parameters
    ----------
    work : str
        Planner's knowledge of the remaining work: ``clairvoyant`` or ``predicted``.
    sharing : str
        ``lockstep`` or ``independent``.
    mean_jct_s : float
        Mean seconds of the members from arrival to convergence.
    lower_bound_s : float
        Lower bound of the objective: no schedule has a smaller makespan or mean time.
    ratio : float
        Ratio of the objective to `lower_bound_s`; 1.0 is the optimum.
    restarts : int
        Number of starts of members that had trained before.
    gpu_busy_fraction : float
        GPU-seconds of intervals without restarts, over those of all GPUs until the makespan.
    plan_seconds : float
        Total planning time of all decisions in seconds.
    slowest_plan_s : float
        Planning time of the slowest decision in seconds.
    members : tuple of Forecast
        Completions; `done_s` counts from the start of the run.
    reason : str
        Reason for the choice of the planner; empty if the user named it.
    """

    planner: str
    objective: str
    work: str
    sharing: str
    gpus: int
    gpus_per_node: int
    makespan_s: float
    mean_jct_s: float
    lower_bound_s: float
    ratio: float
    rounds: int
    restarts: int
    gpu_busy_fraction: float
    plan_seconds: float
    slowest_plan_s: float
    intervals: tuple[Interval, ...] = ()
    members: tuple[Forecast, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
