"""Ends of members in a round, and stops where tasks follow each other under one name, as visits do."""

from __future__ import annotations

import pytest

from hetctl.model.exit_reason import ExitReason
from hetctl.model.plan import Allocation, Placement
from hetctl.runtime.driver.active_round import ActiveRound
from hetctl.runtime.driver.running_group import EndedGroup
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import RunFolder

PLACE = (Placement("n1", (0,)),)
STOPPED, KILLED = 0, 137
NOT_BUSY: dict[str, float] = {}


@pytest.fixture
def told():
    return []


@pytest.fixture
def visits(tmp_path, told):
    """A round of visits in which member a has one."""
    folder = RunFolder(tmp_path)
    folder.events.mkdir()
    events = EventWriter(folder.events, "driver", 0)
    opened = ActiveRound(folder, 0, events, lambda name, _reason: told.append(name), visits=True)
    begin(opened)
    return opened


def begin(opened):
    opened.expect_events_of("a")
    opened.active["a"] = Allocation("a", 1, "hopper", 1.0, PLACE)


def end(opened, exit_code):
    return opened.close(EndedGroup("a", PLACE, exit_code, ""), opened.report_of("a"), 0)


def overdue(opened):
    return [name for name, _ in opened.overdue()]


@pytest.mark.parametrize("is_signalled", [False, True])
def test_a_stop_is_over_with_the_visit_that_was_told(visits, told, is_signalled):
    visits.stop_member("a", "state lost", NOT_BUSY)
    assert (told, overdue(visits)) == (["a"], ["a"])
    if is_signalled:
        visits.terminated.add("a")
    assert end(visits, KILLED if is_signalled else STOPPED) is ExitReason.STOPPED
    begin(visits)
    assert overdue(visits) == []
    assert end(visits, KILLED) is ExitReason.KILLED


def test_a_stop_that_comes_after_the_end_is_for_no_later_visit(visits, told):
    end(visits, STOPPED)
    visits.stop_member("a", "state lost", NOT_BUSY)
    begin(visits)
    assert (told, overdue(visits)) == ([], [])


@pytest.mark.parametrize("reason", ["signal", "deadline"])
@pytest.mark.parametrize(
    ("exit_code", "expected"), [(KILLED, "told"), (1, "program-error"), (74, "disk-full")]
)
def test_a_trainer_may_die_after_it_has_stopped(visits, reason, exit_code, expected):
    EventWriter(visits.folder.events, "a", 0).write("stopped", reason=reason, part_samples=0)
    assert end(visits, exit_code) is ExitReason(expected)
