"""What planners are told of members in training."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetctl.core.events import Event
from hetctl.core.profile import Candidate
from hetctl.core.steps import report_of
from hetctl.runtime.driver.workloads import as_of_now

CANDIDATE = Candidate("m", {1: 10.0}, samples_left=340.0, samples_per_epoch=100, startup_s=5.0)


def event(kind, time, **data):
    return Event("m", 0, kind, time, data)


def left(*events, now, part=60, candidate=CANDIDATE):
    return as_of_now(candidate, part, 10.0, report_of(events).epoch_since, now).samples_left


def test_before_its_first_step_a_member_has_trained_nothing():
    assert left(event("epoch", 1.0), event("started", 2.0), now=9.0) == 340


def test_samples_count_from_the_first_step_on():
    assert left(event("started", 1.0), event("first_step", 2.0), now=4.0) == 320


def test_no_more_is_counted_than_the_epoch_holds():
    assert left(event("first_step", 0.0), now=99.0) == 300


def test_an_epoch_begins_when_the_one_before_is_reported():
    events = event("first_step", 0.0), event("epoch", 10.0, evaluate_s=0.1)
    assert left(*events, now=12.0, part=0) == 320


def test_without_known_epochs_nothing_is_guessed():
    unknown = Candidate("m", {1: 10.0}, samples_left=340.0)
    assert left(event("first_step", 0.0), now=9.0, candidate=unknown) == 340


@given(st.floats(-10, 1e6), st.integers(0, 150), st.floats(0, 1e6))
def test_what_is_left_neither_grows_nor_falls_below_zero(now, part, samples):
    candidate = Candidate("m", {1: 10.0}, samples, 100)
    assert 0 <= left(event("first_step", 0.0), now=now, part=part, candidate=candidate) <= samples
