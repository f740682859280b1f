"""What was decided: rounds of allocations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DATA_PARALLEL, HOPPER, PIPELINE = "data-parallel", "hopper", "pipeline"
BALANCED = "balanced"
"""Data-parallel over all types of GPU, in batches that take all of a group equally long."""


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
    batch_sizes : tuple of int
        Samples of each GPU and step, in the order of the placement; empty: the member's own on each.
    """

    member: str
    gpus: int
    mode: str
    rate: float
    placement: tuple[Placement, ...]
    batch_sizes: tuple[int, ...] = ()


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
class ModeChoice:
    """How a member begins to train, and why."""

    member: str
    mode: str
    why: str


@dataclass(frozen=True)
class Phase:
    """Members that train in one mode, on all GPUs, until the next phase.

    Parameters
    ----------
    prices : mapping of str to float
        Simulated seconds of these members' work by mode, in this one and in others they could have.
    """

    mode: str
    members: tuple[str, ...]
    start_s: float
    predicted_s: float
    prices: Mapping[str, float] = field(default_factory=dict)


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
    choices : tuple of ModeChoice
        Empty where all members train data-parallel without any choice.
    phases : tuple of Phase
        One after the other; `rounds` are those of the data-parallel one.
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
    choices: tuple[ModeChoice, ...] = ()
    phases: tuple[Phase, ...] = ()
