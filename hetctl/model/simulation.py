"""What a simulated run came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetctl.model.plan import Allocation, Forecast


@dataclass(frozen=True)
class Interval:
    """A time in which a member held a constant number of GPUs.

    Parameters
    ----------
    restart_s : float
        Seconds of the interval that went into starting the member again.
    samples : float
        Trained in the rest of it.
    """

    allocation: Allocation
    round_index: int
    start_s: float
    end_s: float
    restart_s: float
    samples: float

    @property
    def member(self) -> str:
        """The name of the member."""
        return self.allocation.member

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.allocation.gpus


@dataclass(frozen=True)
class Simulation:
    """The course of a run under a virtual clock, and how far it is from the limit.

    Parameters
    ----------
    work : str
        ``clairvoyant`` or ``predicted``: what the planner knew of the work left.
    sharing : str
        ``lockstep`` or ``independent``.
    mean_jct_s : float
        Mean time of the members from their arrival to their convergence.
    lower_bound_s : float
        Of the objective: no schedule can have a smaller makespan or mean time.
    ratio : float
        The objective over `lower_bound_s`; 1.0 is the limit.
    restarts : int
        Starts of members that had trained before.
    gpu_busy_fraction : float
        GPU-seconds of intervals, restarts left out, over all GPUs' until the makespan.
    plan_seconds : float
        What all decisions took the planner.
    slowest_plan_seconds : float
        What the slowest of them took.
    members : tuple of Forecast
        `done_s` counts from the start of the run.
    why : str
        Why this planner was chosen; empty where a person named it.
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
    slowest_plan_seconds: float
    intervals: tuple[Interval, ...] = ()
    members: tuple[Forecast, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
