"""Plans: rounds of allocations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from hetctl.model.pipelines import PipelineLayout
from hetctl.model.serialization import OMITTED
from hetctl.model.values import dataclass

DATA_PARALLEL, HOPPER, PIPELINE = "data-parallel", "hopper", "pipeline"
USUAL_PLANNER = "fluid"
"""Planner unless the user names another."""
HOP_SCHEDULERS = ("best", "randomized", "milp", "approximate")
"""Schedulers of hops, as in `hetctl.methods.hopper.SCHEDULERS`."""
PIPELINE_POLICIES = ("np", "ed", "hd", "best")
"""Policies of virtual workers, as in `hetctl.methods.pipeline.pipeline_plan.POLICIES`."""
LOCAL, ROUND_ROBIN = "local", "round-robin"
PS_PLACEMENTS = (LOCAL, ROUND_ROBIN)
"""Placements of layers on the parameter servers of a pipeline, one server on each node; the default first."""
BALANCED = "balanced"
"""Mode of data-parallel training on all GPU types, with batch sizes that give equal step times."""
FUSED = "fused"
"""Mode of members of one shape that train on one GPU as one computation."""


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs of one node that a member holds, by number.

    Parameters
    ----------
    seat : int
        Number, from 1, among the members that share its one GPU; 0: it holds its GPUs alone.
    """

    node: str
    gpus: tuple[int, ...]
    seat: int = field(default=0, metadata=OMITTED)


@dataclass(frozen=True, slots=True)
class Allocation:
    """A member's share of one round.

    Parameters
    ----------
    rate : float
        Predicted rate in samples/s.
    batch_sizes : tuple of int
        Samples per GPU and step, in the order of the placement; empty: the member's own on each GPU.
    pipeline : PipelineLayout or None
        Stages by rank, in the order of the placement's GPUs; None in any mode but ``pipeline``.
    rate_known : bool
        False if the rate is an estimate: it was not measured, and not seen in training.
    alone : bool
        True if nobody else sits on its GPU until it has reported its rate and its busy share.
    beside : tuple of str
        Members that are to sit on its GPU when it starts.
    """

    member: str
    gpus: int
    mode: str
    rate: float
    placement: tuple[Placement, ...]
    batch_sizes: tuple[int, ...] = ()
    pipeline: PipelineLayout | None = None
    rate_known: bool = True
    alone: bool = field(default=False, metadata=OMITTED)
    beside: tuple[str, ...] = field(default=(), metadata=OMITTED)

    @property
    def own_gpus(self) -> int:
        """Number of GPUs that nobody else may use: 0 if it has a seat on one."""
        return 0 if any(part.seat for part in self.placement) else self.gpus

    def gpus_alone(self, *, joined: bool) -> int:
        """Return the number of GPUs that it has had alone so far: 0 once another has `joined` it."""
        return self.own_gpus if joined or self.beside or self.mode == FUSED else self.gpus


@dataclass(frozen=True)
class Round:
    """Allocations that start together.

    Parameters
    ----------
    reasons : mapping
        Reason by member why it got its GPUs or waits.
    """

    index: int
    predicted_s: float
    allocations: tuple[Allocation, ...]
    start_s: float = 0.0
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModeChoice:
    """Mode in which a member begins to train, with the reason."""

    member: str
    mode: str
    reason: str


@dataclass(frozen=True)
class Phase:
    """Members that train in one mode, on all GPUs, until the next phase.

    Parameters
    ----------
    makespans_s : mapping of str to float
        Simulated seconds of these members' work, by mode of the phase and its alternatives.
    """

    mode: str
    members: tuple[str, ...]
    start_s: float
    predicted_s: float
    makespans_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Forecast:
    """Predicted completion of a member, in seconds from the start of the plan."""

    member: str
    done_s: float
    training_s: float


@dataclass(frozen=True)
class Plan:
    """All predicted rounds until all members have converged.

    Parameters
    ----------
    lower_bound_s : float
        Lower bound of the makespan of any schedule (the fluid bound).
    ratio : float
        Ratio of `predicted_makespan_s` to `lower_bound_s`; 1.0 is the optimum.
    reason : str
        Reason for the choice of the planner; empty if the user named it.
    choices : tuple of ModeChoice
        Modes of the members; empty if all train data-parallel without a choice.
    phases : tuple of Phase
        Consecutive phases; `rounds` are those of the data-parallel one.
    inputs : str
        Digest of all inputs of the plan.
    balance_gains : mapping of str to float
        Ratio of the expected rates with balanced and with equal batches, by member, for those that begin on
        several types of GPU and were measured on each.
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
    reason: str = ""
    choices: tuple[ModeChoice, ...] = ()
    phases: tuple[Phase, ...] = ()
    inputs: str = ""
    balance_gains: Mapping[str, float] = field(default_factory=dict)
