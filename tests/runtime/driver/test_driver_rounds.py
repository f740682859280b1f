"""Reasons for the ends of tasks, by the group, the trainer's report, and what the scheduling told it."""

from __future__ import annotations

import pytest

from hetctl.model.events import ExitReason
from hetctl.model.hops import Visit
from hetctl.model.plan import Allocation, Placement
from hetctl.runtime.driver.rank_group import RankGroup
from hetctl.runtime.driver.rounds import reason_of_end
from hetctl.runtime.worker.messages import VISIT, TaskMessage
from hetctl.scheduling.commands import Task
from hetctl.scheduling.job_scheduler import RunningTask
from hetctl.storage.task_fold import LAST_EVENTS, TaskReport

PLACE = (Placement("n1", (0,)),)
STOPPED, KILLED = 0, 137


def reason(exit_code, *, stopping=False, terminated=False, told=None):
    """Return why a visit of member a ended."""
    task = Task(Allocation("a", 1, "hopper", 1.0, PLACE), Visit(0, "a", 0, "p0", "n1:0"))
    group = RankGroup(TaskMessage(VISIT, "/x", "a"), PLACE, exit_code=exit_code, terminated=terminated)
    report = TaskReport(exit_reason=LAST_EVENTS.get(told or ""))
    return reason_of_end(group, RunningTask(task, 0, 1.0, 0.0, stopping=stopping), report)


@pytest.mark.parametrize("terminated", [False, True])
def test_a_task_that_was_told_to_stop_may_be_killed_meanwhile(terminated):
    assert reason(KILLED, stopping=True, terminated=terminated) is ExitReason.STOPPED
    assert reason(KILLED) is ExitReason.KILLED


def test_a_visit_that_ends_in_order_needs_no_last_event():
    assert reason(STOPPED) is ExitReason.STOPPED


@pytest.mark.parametrize(
    ("exit_code", "expected"), [(KILLED, "told"), (1, "program-error"), (74, "disk-full")]
)
def test_a_trainer_may_die_after_it_has_stopped(exit_code, expected):
    assert reason(exit_code, told="stopped") is ExitReason(expected)
