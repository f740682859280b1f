"""Time of a phase over several jobs, and of members that train one after another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.parallelism import JobTime, phase_in_turn
from hetctl.model.errors import InfeasibleError
from hetctl.scheduling.simulate.scenario import JobTiming

NO_LIMIT = JobTiming()


def test_a_job_without_a_limit_takes_its_training_and_one_start():
    assert JobTime(NO_LIMIT, startup_s=5.0, longest_s=7.0).elapsed_s(100.0) == 105.0


def test_work_that_fits_one_job_has_no_interruption():
    assert (
        JobTime(JobTiming(wall_s=120.0, grace_s=20.0), startup_s=5.0, longest_s=50.0).elapsed_s(95.0) == 100.0
    )


def test_each_further_job_starts_up_and_leaves_room_for_a_unit():
    """200 s, 100 - (4 + 1) - 15 = 80 s of them in each job: three jobs, and two breaks of 15 + 3 s."""
    timing = JobTiming(wall_s=120.0, grace_s=20.0, job_overhead_s=3.0, job_start_s=4.0)
    time = JobTime(timing, startup_s=1.0, mean_s=15.0)
    assert time.elapsed_s(200.0) == 200.0 + 3 * 5.0 + 2 * (15.0 + 3.0)


def test_a_job_that_is_too_short_for_a_unit_is_refused():
    with pytest.raises(InfeasibleError, match=r"a job has 100 s for training, .* take 101 s"):
        JobTime(JobTiming(wall_s=100.0), startup_s=1.0, longest_s=100.0).elapsed_s(200.0)


@given(st.floats(0, 1e4), st.floats(0, 1e4))
def test_more_training_is_never_done_sooner(one, other):
    time = JobTime(JobTiming(wall_s=120.0, grace_s=20.0, job_overhead_s=3.0), startup_s=5.0, mean_s=15.0)
    less, more = sorted((one, other))
    assert time.elapsed_s(less) <= time.elapsed_s(more)


def test_members_in_turn_train_one_after_another():
    run = phase_in_turn({"a": 10.0, "b": 5.0}, NO_LIMIT)
    assert (run.seconds, run.done_s, run.training_s) == (15.0, {"a": 10.0, "b": 15.0}, {"a": 10.0, "b": 5.0})
