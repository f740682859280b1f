"""What was decided: rounds of allocations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DATA_PARALLEL = "data-parallel"


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs of one node that a member holds."""

    node: str
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """A member's share of one round.

    Parameters
    ----------
    rate : float
        Predicted samples/s.
    """

    member: str
    gpus: int
    mode: str
    rate: float
    placement: tuple[Placement, ...]


@dataclass(frozen=True)
class Round:
    """Allocations that start together.

    Parameters
    ----------
    reasons : mapping
        By member, why it got its GPUs, or why it waits.
    """

    index: int
    predicted_s: float
    allocations: tuple[Allocation, ...]
    start_s: float = 0.0
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Forecast:
    """When a member is predicted to be done, in seconds from the start of the plan."""

    member: str
    done_s: float
    training_s: float


@dataclass(frozen=True)
class Plan:
    """Every round that is predicted until all members have converged.

    Parameters
    ----------
    lower_bound_s : float
        No schedule can be shorter (the fluid bound).
    ratio : float
        `predicted_makespan_s` over `lower_bound_s`; 1.0 is the limit.
    why : str
        Why this planner was chosen; empty where a person named it.
    """

    planner: str
    objective: str
    gpus: int
    gpus_per_node: int
    predicted_makespan_s: float
    lower_bound_s: float
    ratio: float
    rounds: tuple[Round, ...]
    members: tuple[Forecast, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
