from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.plan import Allocation
from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import has_room
from hetctl.scheduling.simulate.simulated_task import SimulatedTask, begin, stopped, with_rate

ON_ONE_GPU = Allocation("a", 1, "data-parallel", 10.0, ())


def workload(left: float = 300.0, epoch: int | None = 100) -> Workload:
    return Workload("a", {1: 10.0}, left, epoch, startup_s=5.0, evaluate_s=2.0, checkpoint_s=1.0)


def task(member: Workload, deadline_s: float = math.inf) -> SimulatedTask | None:
    return begin(member, ON_ONE_GPU, 0, 100.0, deadline_s)


def test_a_task_is_start_up_and_epochs() -> None:
    whole = task(workload())
    assert whole is not None
    assert (whole.end_s, whole.samples, whole.converged) == (100 + 5 + 3 * 13, 300.0, True)


@pytest.mark.parametrize(("deadline_s", "epochs"), [(118.0, 1), (130.9, 1), (131.0, 2), (144.0, 3)])
def test_epochs_that_would_not_fit_are_not_started(deadline_s: float, epochs: int) -> None:
    cut = task(workload(), deadline_s)
    assert cut is not None
    assert (cut.end_s, cut.samples) == (105 + epochs * 13, epochs * 100.0)
    assert cut.converged is (epochs == 3)


def test_a_task_that_would_get_nothing_done_does_not_begin() -> None:
    assert not has_room(workload(), 10.0, 100.0, 117.9)
    assert not has_room(workload(epoch=None), 10.0, 100.0, 106.0)
    assert task(workload(epoch=None), 106.0) is None


def test_without_epochs_a_task_lasts_until_time_for_a_checkpoint() -> None:
    cut = task(workload(epoch=None), 116.0)
    assert cut is not None
    assert (cut.end_s, cut.samples) == (116.0, 100.0)


def test_a_member_with_nothing_left_only_starts_up() -> None:
    empty = task(workload(left=0.0))
    assert empty is not None
    assert (empty.end_s, empty.converged) == (105.0, True)


@pytest.mark.parametrize(
    ("now", "end_s", "samples"),
    [
        (102.0, 105.0, 0.0),  # while starting up
        (109.0, 110.0, 40.0),  # in the first epoch
        (116.0, 118.0, 100.0),  # while evaluating it
        (120.0, 121.0, 120.0),  # in the second
        (143.5, 144.0, 300.0),  # too late to be quicker than its end
    ],
)
def test_a_stopped_task_keeps_what_it_trained(now: float, end_s: float, samples: float) -> None:
    running = task(workload())
    assert running is not None
    ended = stopped(running, now)
    assert (ended.end_s, ended.samples) == pytest.approx((end_s, samples))
    assert ended.converged is (samples == 300)


def test_a_member_stopped_in_its_last_evaluation_converges() -> None:
    running = task(workload())
    assert running is not None
    ended = stopped(running, 141.5)
    assert (ended.end_s, ended.converged) == (144.0, True)


@given(
    st.sampled_from([0.0, 30.0, 100.0, 101.0, 300.0]),
    st.sampled_from([None, 100, 300]),
    st.integers(0, 60),
    st.sampled_from([0.0, 20.0, math.inf]),
)
def test_a_task_with_room_gets_something_done_in_time(
    left: float, epoch: int | None, room_s: int, max_uninterrupted_s: float
) -> None:
    member = workload(left, epoch)
    if has_room(member, 10.0, 100.0, 100.0 + room_s, max_uninterrupted_s):
        begun = begin(member, ON_ONE_GPU, 0, 100.0, 100.0 + room_s, max_uninterrupted_s)
        assert begun is not None
        assert begun.samples > 0 or not left
        assert begun.end_s <= 100.0 + room_s


def test_at_its_own_rate_a_member_trains_into_the_deadline() -> None:
    """At 5/s it has 50 of 100 samples at 115; at 10/s 30 more by 118, with 1 s for the checkpoint."""
    slow = begin(workload(), ON_ONE_GPU, 0, 100.0, 119.0, math.inf, 5.0)
    assert slow is not None
    assert (slow.end_s, slow.samples) == (118.0 + 1.0, 65.0)
    alone = with_rate(slow, 115.0, 10.0, 119.0)
    assert (alone.end_s, alone.samples) == (119.0, 80.0)
