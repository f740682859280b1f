"""The newest layout and stages of members, in whatever order events are read."""

from __future__ import annotations

import itertools

import pytest
from pipelined_run import ALONE, LAYOUT, STAGES, stages, task_started

from hetctl.model.event_records import record_of
from hetctl.model.events import DRIVER, Event
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import RunFolder
from hetctl.storage.visit_fold import FoldLog, StageFold

EVENTS = (
    Event(DRIVER, 0, "task_started", 1.0, task_started(ALONE)),
    Event("a", 0, "stages", 2.0, stages(1, STAGES[:2])),
    Event(DRIVER, 1, "task_started", 3.0, task_started(rate=70.0)),
    Event("a", 1, "stages", 4.0, stages(2)),
)


@pytest.mark.parametrize("events", list(itertools.permutations(EVENTS)))
def test_the_newest_counts_in_whatever_order_it_is_read(events):
    fold = StageFold()
    for event in events:
        fold.add([event])
    task, told = fold.task_of("a"), fold.stages_of("a")
    assert (task.pipeline, task.rate) == (LAYOUT, 70.0)
    assert (told.epoch, told.stages) == (2, STAGES)


def test_tasks_of_other_modes_and_other_members_are_left_out():
    fold = StageFold()
    fold.add([Event(DRIVER, 0, "task_started", 1.0, task_started(None)), *EVENTS[1:2]])
    assert fold.task_of("a") is None
    assert (fold.task_of("b"), fold.stages_of("b")) == (None, None)


def test_a_layout_that_cannot_be_read_is_no_event():
    assert record_of("task_started", task_started()).pipeline is not None
    with pytest.raises(ValueError, match="PipelineLayout"):
        record_of("task_started", task_started() | {"pipeline": {"workers": [[{"rank": 0}]]}})


def test_a_log_reads_what_was_appended(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    log = FoldLog(StageFold(), run, ["a"])
    assert log.refresh().task_of("a") is None
    EventWriter(run.events, DRIVER, 0).write("task_started", **task_started())
    assert log.refresh().task_of("a").pipeline == LAYOUT
    for epoch in (1, 2):
        EventWriter(run.events, "a", 0).write("stages", **stages(epoch))
        assert log.refresh().stages_of("a").epoch == epoch
