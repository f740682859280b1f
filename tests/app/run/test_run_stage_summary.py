"""Status of pipelines from events: layout, newest epoch, and its rate beside the planned one."""

from __future__ import annotations

from pipelined_run import ALONE, LAYOUT, STAGES, stages, step_started

from hetctl.app.run.stage_summary import pipeline_statuses
from hetctl.model.events import DRIVER, Event
from hetctl.model.pipelines import pipeline_use
from hetctl.model.training_progress import EpochResult
from hetctl.storage.stage_fold import StageFold

STEP = Event(DRIVER, 0, "step_started", 1.0, step_started())
HISTORY = {"a": (EpochResult(1, {}, 10.0, 4, 12.0, 90.0), EpochResult(2, {}, 10.0, 4, 22.0, 80.0)), "b": ()}


def statuses(*events):
    fold = StageFold()
    fold.add(events)
    return pipeline_statuses(fold, HISTORY)


def test_the_rate_is_that_of_the_reported_epoch():
    (seen,) = statuses(STEP, Event("a", 0, "stages", 2.0, stages(1)))
    assert (seen.member, seen.layout, seen.predicted_rate) == ("a", LAYOUT, 100.0)
    assert (seen.last.epoch, seen.last.rate, seen.last.use) == (1, 90.0, pipeline_use(STAGES))


def test_an_epoch_that_has_not_ended_has_no_rate():
    (seen,) = statuses(STEP, Event("a", 0, "stages", 2.0, stages(3)))
    assert (seen.last.epoch, seen.last.rate) == (3, None)


def test_before_its_first_epoch_a_pipeline_has_a_layout():
    assert [(seen.layout, seen.last) for seen in statuses(STEP)] == [(LAYOUT, None)]


def test_figures_of_an_earlier_layout_are_left_out():
    earlier = Event("a", 0, "stages", 2.0, stages(1))
    (seen,) = statuses(STEP, earlier, Event(DRIVER, 1, "step_started", 3.0, step_started(ALONE)))
    assert (seen.layout, seen.last) == (ALONE, None)


def test_members_of_other_modes_have_no_pipeline():
    assert statuses(Event(DRIVER, 0, "step_started", 1.0, step_started(None))) == ()
