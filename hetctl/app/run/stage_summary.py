"""Status of a run's pipelines from the events about their steps and stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hetctl.model.pipeline_layout import PipelineLayout
from hetctl.model.pipeline_status import PipelineEpoch, PipelineStatus, StageReport, pipeline_use
from hetctl.model.training_progress import EpochResult
from hetctl.storage.event_schema import Stages
from hetctl.storage.stage_fold import StageFold


def pipeline_statuses(
    fold: StageFold, history: Mapping[str, Sequence[EpochResult]]
) -> tuple[PipelineStatus, ...]:
    """Return the pipelines of members that train, or trained, in that mode.

    Parameters
    ----------
    history : mapping of str to sequence of EpochResult
        Finished epochs of the members to be shown.
    """
    found = (_status(name, fold, epochs) for name, epochs in history.items())
    return tuple(status for status in found if status is not None)


def _status(name: str, fold: StageFold, epochs: Iterable[EpochResult]) -> PipelineStatus | None:
    step, stages = fold.step_of(name), fold.stages_of(name)
    if step is None or step.pipeline is None:
        return None
    # After the loss of a node the layers are on other stages: the figures of the earlier ones are void.
    known = stages is not None and _are_of(step.pipeline, stages.stages)
    last = _epoch(stages, epochs) if stages is not None and known else None
    return PipelineStatus(name, step.pipeline, step.rate, last)


def _are_of(layout: PipelineLayout, stages: Iterable[StageReport]) -> bool:
    """Return true if these are the stages of a layout."""
    planned = {
        (number, index, plan.first, plan.last)
        for number, plans in enumerate(layout.workers)
        for index, plan in enumerate(plans)
    }
    return planned == {(stage.virtual_worker, stage.stage, *stage.layers) for stage in stages}


def _epoch(told: Stages, epochs: Iterable[EpochResult]) -> PipelineEpoch:
    rate = next((result.rate for result in epochs if result.epoch == told.epoch), None)
    return PipelineEpoch(told.epoch, told.duration_s, rate, pipeline_use(told.stages), told.stages)
