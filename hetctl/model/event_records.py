"""Records of events by kind: the fields that are read; a line without them is corrupt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from hetctl.model.events import ExitReason, Request
from hetctl.model.hops import HopPlanMade, VisitEnd
from hetctl.model.pipelines import PipelineLayout, StageReport
from hetctl.model.plan import Placement
from hetctl.model.profile import LayerPoint, LinkPoint, PreprocessPoint, ProfilePoint
from hetctl.model.searches import PART, REPORT, SEARCH_ENDED, TRIAL, Trial
from hetctl.model.serialization import decode
from hetctl.model.training_progress import BestCheckpoint, EpochResult, TimedRate
from hetctl.model.values import dataclass


@dataclass(frozen=True)
class TaskStarted:
    """Launch of a member."""

    member: str
    gpus: int
    placement: tuple[Placement, ...]
    rate: float = 0.0
    pipeline: PipelineLayout | None = None


@dataclass(frozen=True)
class Stages:
    """Times of the stages of a pipeline in a part of an epoch."""

    epoch: int
    duration_s: float
    stages: tuple[StageReport, ...]


@dataclass(frozen=True)
class TrialRequested(Trial):
    """Request of a search to train a trial until it has so many epochs in all."""

    member: str = field(kw_only=True)


def _form(**fields: Any) -> type:
    """Return a record of fields with these types; an optional field has its default beside its type."""
    hints = {name: how[0] if isinstance(how, tuple) else how for name, how in fields.items()}
    defaults = {name: how[1] for name, how in fields.items() if isinstance(how, tuple)}
    return dataclass(frozen=True)(type("Record", (), {"__annotations__": hints, **defaults}))


FORMS: Mapping[str, type] = {
    "job_started": _form(job=int, nodes=(tuple[Any, ...], ())),
    "job_ended": _form(job=int, reason=str),
    "node_failed": _form(job=int, nodes=tuple[str, ...]),
    "node_joined": _form(job=int, node=str),
    "round_started": _form(job=int, predicted_s=float),
    "round_ended": _form(ended_by=str),
    "task_started": TaskStarted,
    "task_ended": _form(
        member=str,
        exit_code=int,
        reason=ExitReason,
        description=str,
        unfit_gpus=(int | None, None),
        energy_j=(float | None, None),
        gpu_seconds=(float | None, None),
        gpu_type=(str | None, None),
    ),
    "request": _form(member=str, want=Request, edits=(int, 0)),
    "started": _form(epochs=int, part_samples=int, samples=(int | None, None)),
    "first_step": _form(
        startup_s=(float, 0.0), restart_s=(float | None, None), peak_memory_bytes=(int | None, None)
    ),
    "rate": TimedRate,
    "fused": _form(rates=tuple[tuple[float, ...], ...], gpu_type=(str | None, None)),
    "epoch": EpochResult,
    PART: _form(epoch=int, samples=int, metrics=Mapping[str, float]),
    "checkpoint": _form(epoch=int, part_samples=int, path=(str, ""), duration_s=(float | None, None)),
    "best_checkpoint": BestCheckpoint,
    "stages": Stages,
    "visit": VisitEnd,
    "visit_lost": VisitEnd,
    "visits_undone": _form(numbers=tuple[int, ...], reason=str),
    "hop_plan": HopPlanMade,
    TRIAL: TrialRequested,
    # A trial without a loss has failed.
    REPORT: _form(
        member=str, number=int, epochs=int, loss=(float | None, None), more=(tuple[float, ...], ())
    ),
    SEARCH_ENDED: _form(reason=str),
    "converged": _form(reason=str, duration_s=(float, 0.0)),
    "stopped": _form(reason=str, part_samples=(int, 0), duration_s=(float, 0.0)),
    # A member or a measurement failed; the reason is the value of an `ExitReason`.
    "skipped": _form(),
    "failed": _form(error=str, reason=(str | None, None), peak_memory_bytes=(int | None, None)),
    "point": ProfilePoint,
    "layers": LayerPoint,
    "links": LinkPoint,
    "preprocess": PreprocessPoint,
}
"""Types of records by kind of event; docs/files.md explains the fields."""


def record_of(kind: str, data: Mapping[str, Any]) -> Any:
    """Return the record of an event, or its fields for a kind without one; ValueError if it is corrupt."""
    return decode(FORMS[kind], data) if kind in FORMS else data
