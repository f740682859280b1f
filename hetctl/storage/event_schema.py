"""What each kind of event must say to be of use; one that does not was garbled on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetctl.model.exit_reason import ExitReason
from hetctl.model.plan import Placement
from hetctl.model.profile import PreprocessPoint, ProfilePoint
from hetctl.model.serialization import decode
from hetctl.model.training_progress import EpochResult


@dataclass(frozen=True)
class JobStarted:
    """A driver has begun."""

    job: int


@dataclass(frozen=True)
class JobEnded:
    """A driver has ended in order."""

    job: int
    reason: str


@dataclass(frozen=True)
class NodeFailed:
    """Nodes were lost under a step."""

    job: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class RoundStarted:
    """Members have begun together."""

    job: int
    predicted_s: float


@dataclass(frozen=True)
class RoundEnded:
    """All of them have left."""

    ended_by: str


@dataclass(frozen=True)
class StepStartedRecord:
    """A member was launched."""

    member: str
    gpus: int
    placement: tuple[Placement, ...]


@dataclass(frozen=True)
class StepEndedRecord:
    """A member's step is over."""

    member: str
    exit_code: int
    why: ExitReason
    cause: str


@dataclass(frozen=True)
class FirstStep:
    """A member has made its first step in a round."""

    startup_s: float = 0.0
    restart_s: float | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A member's state is on the disk."""

    epoch: int
    part_samples: int


@dataclass(frozen=True)
class Converged:
    """A member needs no more training."""

    reason: str


@dataclass(frozen=True)
class Stopped:
    """A member has left, and needs more."""

    reason: str
    part_samples: int = 0


@dataclass(frozen=True)
class Failed:
    """A member or a measurement has failed."""

    error: str


FORMS: dict[str, type] = {
    "job_started": JobStarted,
    "job_ended": JobEnded,
    "node_failed": NodeFailed,
    "round_started": RoundStarted,
    "round_ended": RoundEnded,
    "step_started": StepStartedRecord,
    "step_ended": StepEndedRecord,
    "first_step": FirstStep,
    "epoch": EpochResult,
    "checkpoint": Checkpoint,
    "converged": Converged,
    "stopped": Stopped,
    "failed": Failed,
    "point": ProfilePoint,
    "preprocess": PreprocessPoint,
}


def well_formed(kind: str, data: Mapping[str, Any]) -> bool:
    """Whether an event of this kind says what it must; of a kind that is not listed anything goes."""
    try:
        if kind in FORMS:
            decode(FORMS[kind], data)
    except (ValueError, OverflowError):
        return False
    return True
