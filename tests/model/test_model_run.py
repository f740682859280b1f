"""The limits that stop a runaway."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.run import Budget, Usage


@given(st.integers(0, 10**6), st.floats(0, 1e9))
def test_without_limits_nothing_is_exceeded(rounds, seconds):
    assert Budget().exceeded(Usage(rounds, seconds)) is None
    assert Budget().exceeded_by_jobs(rounds) is None


@pytest.mark.parametrize(
    ("rounds", "reason"), [(2, None), (3, "--max-rounds 3 is reached"), (4, "--max-rounds 3 is reached")]
)
def test_so_many_rounds_are_started_and_no_more(rounds, reason):
    assert Budget(max_rounds=3).exceeded(Usage(rounds, 0.0)) == reason


@pytest.mark.parametrize(("hours", "over"), [(0.0, False), (1.49, False), (1.5, True), (9.0, True)])
def test_a_budget_ends_at_its_gpu_hours(hours, over):
    reason = Budget(gpu_hours=1.5).exceeded(Usage(0, hours * 3600))
    assert reason == (f"--gpu-hours 1.5 is used up ({hours:.2f})" if over else None)


def test_a_budget_counts_from_the_time_of_its_grant():
    budget = Budget(max_rounds=2, gpu_hours=1.0, since=Usage(5, 7200.0))
    assert budget.exceeded(Usage(6, 9000.0)) is None
    assert budget.exceeded(Usage(7, 9000.0)) == "--max-rounds 2 is reached"
    assert budget.exceeded(Usage(6, 10800.0)) == "--gpu-hours 1 is used up (1.00)"


@given(st.integers(1, 50), st.integers(0, 100))
def test_so_many_jobs_are_submitted_and_no_more(most, jobs):
    reason = Budget(max_jobs=most).exceeded_by_jobs(jobs)
    assert (reason is not None) == (jobs >= most)
    assert reason is None or f"--max-jobs {most}" in reason


@given(st.floats(0.1, 100), st.floats(0, 1e6), st.integers(1, 64))
def test_a_job_of_the_time_left_uses_up_the_node_hours(hours, used, nodes):
    budget = Budget(node_hours=hours, since=Usage(0, 0.0, 100.0))
    left_s = budget.wall_left_s(Usage(0, 0.0, used), nodes)
    assert used - 100.0 + left_s * nodes == pytest.approx(3600 * hours)
    assert Budget().wall_left_s(Usage(0, 0.0, used), nodes) == float("inf")
