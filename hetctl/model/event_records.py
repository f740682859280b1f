"""Records of events, by their kind: the fields that are read; a line without them was corrupted on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetctl.model.events import ExitReason
from hetctl.model.hops import HopPlanMade, VisitEnd
from hetctl.model.pipelines import PipelineLayout, StageReport
from hetctl.model.plan import Placement
from hetctl.model.profile import LayerPoint, LinkPoint, PreprocessPoint, ProfilePoint
from hetctl.model.searches import REPORT, SEARCH_ENDED, TRIAL
from hetctl.model.serialization import decode
from hetctl.model.training_progress import EpochResult


@dataclass(frozen=True)
class JobStarted:
    """Start of a driver."""

    job: int


@dataclass(frozen=True)
class JobEnded:
    """Regular end of a driver."""

    job: int
    reason: str


@dataclass(frozen=True)
class NodeFailed:
    """Loss of nodes during a task."""

    job: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class NodeBack:
    """Use of a node that was lost, or whose agent connects late."""

    job: int
    node: str


@dataclass(frozen=True)
class RoundStarted:
    """Common start of the members of a round."""

    job: int
    predicted_s: float


@dataclass(frozen=True)
class RoundEnded:
    """End of a round: all its members have left."""

    ended_by: str


@dataclass(frozen=True)
class TaskStartedRecord:
    """Launch of a member."""

    member: str
    gpus: int
    placement: tuple[Placement, ...]
    rate: float = 0.0
    pipeline: PipelineLayout | None = None


@dataclass(frozen=True)
class TaskEndedRecord:
    """End of a member's task."""

    member: str
    exit_code: int
    reason: ExitReason
    description: str


@dataclass(frozen=True)
class FirstStep:
    """First training step of a member in a round."""

    startup_s: float = 0.0
    restart_s: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Started:
    """State from which a trainer goes on: finished epochs, and samples of the next one."""

    epochs: int
    part_samples: int


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint of a member, complete on disk."""

    epoch: int
    part_samples: int
    path: str = ""


@dataclass(frozen=True)
class Converged:
    """Convergence of a member."""

    reason: str


@dataclass(frozen=True)
class Stopped:
    """Exit of a member that needs more training."""

    reason: str
    part_samples: int = 0


@dataclass(frozen=True)
class Failed:
    """Failure of a member or of a measurement; `reason` is the value of an `ExitReason`."""

    error: str
    reason: str | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Stages:
    """Times of the stages of a pipeline in a part of an epoch."""

    epoch: int
    duration_s: float
    stages: tuple[StageReport, ...]


@dataclass(frozen=True)
class VisitsUndone:
    """Visits whose states were lost before they were in a checkpoint."""

    numbers: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class TrialParent:
    """Trial whose checkpoint another trial begins with, and its epochs."""

    trial: int
    epochs: int


@dataclass(frozen=True)
class TrialRequested:
    """Request of a search to train a trial until it has so many epochs in all."""

    member: str
    number: int
    config: Mapping[str, Any]
    epochs: int
    parent: TrialParent | None = None


@dataclass(frozen=True)
class TrialReported:
    """Result of a trial after so many epochs; without a loss it failed."""

    member: str
    number: int
    epochs: int
    loss: float | None = None


@dataclass(frozen=True)
class SearchEnded:
    """End of a search: no trial is asked for any more."""

    reason: str


FORMS: dict[str, type] = {
    "job_started": JobStarted,
    "job_ended": JobEnded,
    "node_failed": NodeFailed,
    "node_joined": NodeBack,
    "round_started": RoundStarted,
    "round_ended": RoundEnded,
    "task_started": TaskStartedRecord,
    "task_ended": TaskEndedRecord,
    "started": Started,
    "first_step": FirstStep,
    "epoch": EpochResult,
    "checkpoint": Checkpoint,
    "stages": Stages,
    "visit": VisitEnd,
    "visit_lost": VisitEnd,
    "visits_undone": VisitsUndone,
    "hop_plan": HopPlanMade,
    TRIAL: TrialRequested,
    REPORT: TrialReported,
    SEARCH_ENDED: SearchEnded,
    "converged": Converged,
    "stopped": Stopped,
    "failed": Failed,
    "point": ProfilePoint,
    "layers": LayerPoint,
    "links": LinkPoint,
    "preprocess": PreprocessPoint,
}


def record_of(kind: str, data: Mapping[str, Any]) -> Any:
    """Return the record of an event; of a kind without one its fields. ValueError if it is corrupt."""
    return decode(FORMS[kind], data) if kind in FORMS else data
