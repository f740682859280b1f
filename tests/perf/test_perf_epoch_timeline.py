from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import EpochTimeline, least_task_s


def workload(left: float, epoch: int | None = 100) -> Workload:
    return Workload("a", {1: 10.0}, left, epoch, startup_s=7.0, evaluate_s=2.0, checkpoint_s=1.0)


def test_the_first_epoch_is_what_is_left_of_one() -> None:
    timeline = EpochTimeline(workload(230.0), 10.0)
    assert (timeline.count, timeline.size_of(0), timeline.size_of(1)) == (3, 30.0, 100.0)
    assert [timeline.end_of(epochs) for epochs in range(4)] == [0, 6, 19, 32]
    assert [timeline.left_after(epochs) for epochs in range(4)] == [230, 200, 100, 0]
    assert [timeline.epochs_within(s) for s in (5.9, 6.0, 18.9, 19.0, 1e9, float("inf"))] == [
        0,
        1,
        1,
        2,
        3,
        3,
    ]


def test_without_known_epochs_all_work_is_one_unevaluated_epoch() -> None:
    timeline = EpochTimeline(workload(230.0, epoch=None), 10.0)
    assert (timeline.count, timeline.end_of(1)) == (1, 24.0)


def test_nothing_left_has_no_epochs() -> None:
    timeline = EpochTimeline(workload(0.0), 10.0)
    assert (timeline.count, timeline.epochs_within(1e9), timeline.left_after(0)) == (0, 0, 0.0)


def test_the_least_step_holds_an_epoch_or_a_checkpoint() -> None:
    assert least_task_s(workload(230.0), 10.0) == 7 + 3 + 2 + 1
    assert least_task_s(workload(230.0, epoch=None), 10.0) == 7 + 1


@settings(deadline=None)
@given(st.floats(1e-6, 1e6), st.integers(1, 5000), st.floats(0.1, 1e4))
def test_rounding_adds_no_epoch_and_takes_none_away(left: float, epoch: int, rate: float) -> None:
    timeline = EpochTimeline(workload(left, epoch), rate)
    assert timeline.size_of(0) + (timeline.count - 1) * timeline.each == pytest.approx(left)
    assert 0 < timeline.size_of(0) <= epoch * (1 + 1e-6)
    for epochs in {1, timeline.count // 2, timeline.count} - {0}:
        assert timeline.epochs_within(timeline.end_of(epochs)) == epochs
