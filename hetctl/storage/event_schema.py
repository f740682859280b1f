"""Required fields of each kind of event; an event without them was corrupted on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetctl.model.exit_reason import ExitReason
from hetctl.model.pipelines import PipelineLayout, StageReport
from hetctl.model.plan import Placement
from hetctl.model.profile import PreprocessPoint, ProfilePoint
from hetctl.model.searches import REPORT, SEARCH_ENDED, TRIAL
from hetctl.model.serialization import decode
from hetctl.model.training_progress import EpochResult, RankShare


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
    """Failure of a member or of a measurement."""

    error: str


@dataclass(frozen=True)
class BalanceStarted:
    """Start of a manager of batch sizes, with the parts of all ranks at that time."""

    reason: str
    ranks: tuple[RankShare, ...]


@dataclass(frozen=True)
class BatchSizes:
    """Parts of all ranks after a change of the batch sizes."""

    ranks: tuple[RankShare, ...]


@dataclass(frozen=True)
class Stages:
    """Times of the stages of a pipeline in a part of an epoch."""

    epoch: int
    duration_s: float
    stages: tuple[StageReport, ...]


@dataclass(frozen=True)
class Straggler:
    """Rank that delays its group and whose batch cannot become smaller."""

    rank: RankShare
    message: str


@dataclass(frozen=True)
class MigrationRecord:
    """Samples of partitioned data that one rank has sent to another; ranks are given as node and GPU."""

    source: str
    target: str
    samples: int
    bytes: int


@dataclass(frozen=True)
class SampleAccessesRecord:
    """Visits of the samples of partitioned data after an epoch, and how many samples each rank holds."""

    epoch: int
    fewest: int
    most: int
    held: tuple[int, ...]


@dataclass(frozen=True)
class PartitionsStagedRecord:
    """Partitions of the data that a node has copied to its own disk, and those that were there already."""

    node: str
    copied: tuple[int, ...]
    kept: tuple[int, ...]
    bytes: int
    duration_s: float
    errors: tuple[str, ...]


@dataclass(frozen=True)
class VisitEnded:
    """End of a visit of a member that hops, with its new state."""

    number: int
    epoch: int
    evaluates: bool
    partition: int
    worker: str
    began_at: float
    ended_at: float
    waited_s: float
    hop_s: float
    bytes: int
    samples: int
    loss: float | None = None


@dataclass(frozen=True)
class VisitLost:
    """End of a visit without a new state."""

    number: int
    epoch: int
    evaluates: bool
    partition: int
    worker: str
    began_at: float
    ended_at: float
    reason: str


@dataclass(frozen=True)
class VisitsUndone:
    """Visits whose states were lost before they were in a checkpoint."""

    numbers: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class HopPlanMade:
    """Plan of the visits of members that hop, with the partitions by worker."""

    scheduler: str
    predicted_s: float
    lower_bound_s: float
    workers: Mapping[str, tuple[str, ...]]
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
    "partitions_staged": PartitionsStagedRecord,
    "round_started": RoundStarted,
    "round_ended": RoundEnded,
    "task_started": TaskStartedRecord,
    "task_ended": TaskEndedRecord,
    "started": Started,
    "first_step": FirstStep,
    "epoch": EpochResult,
    "checkpoint": Checkpoint,
    "balance_started": BalanceStarted,
    "batch_sizes": BatchSizes,
    "stages": Stages,
    "straggler": Straggler,
    "migration": MigrationRecord,
    "sample_accesses": SampleAccessesRecord,
    "visit": VisitEnded,
    "visit_lost": VisitLost,
    "visits_undone": VisitsUndone,
    "hop_plan": HopPlanMade,
    TRIAL: TrialRequested,
    REPORT: TrialReported,
    SEARCH_ENDED: SearchEnded,
    "converged": Converged,
    "stopped": Stopped,
    "failed": Failed,
    "point": ProfilePoint,
    "preprocess": PreprocessPoint,
}


def well_formed(kind: str, data: Mapping[str, Any]) -> bool:
    """Return true if an event has the required fields of its kind; unlisted kinds require none."""
    try:
        if kind in FORMS:
            decode(FORMS[kind], data)
    except (ValueError, OverflowError):
        return False
    return True
